"""Modules of torchvision, timm and transformers with example inputs, and their exports."""

from __future__ import annotations

import dataclasses
import importlib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.zoo.catalog import EXPORTS, Model

# torch.export takes an extent of 1 for a constant.
_OPEN_BATCH = 2
_WORDS = 16
_CACHED = 8
_VOCABULARY = 500
_WIDTH = 64
_HEADS = 4
_LAYERS = 2
_FRAMES = 200
# For statistics of normalisations; and the size of what is added to equal weights.
_BATCH = 4
_NOISE = 0.1
# Segmentation and detection have a backbone and return dictionaries.
_IN_PARTS = ("lraspp", "deeplab", "ssd")


@dataclasses.dataclass(frozen=True)
class Made:
    """A module with the names, examples and open axes of its inputs."""

    module: torch.nn.Module
    inputs: dict[str, torch.Tensor]
    open_axes: dict[str, dict[int, str]]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the inputs."""
        return {name: tuple(value.shape) for name, value in self.inputs.items()}


class Tensors(torch.nn.Module):
    """A model of transformers that takes tensors by position and returns a tuple of them."""

    def __init__(self, model: torch.nn.Module, names: Sequence[str], output: str) -> None:
        super().__init__()
        self.model, self.names, self.output = model, tuple(names), output

    def forward(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the model."""
        given = dict(zip(self.names, values, strict=False))
        rest = values[len(self.names) :]
        if not rest:
            return (getattr(self.model(**given), self.output),)
        cache = importlib.import_module("transformers").DynamicCache()
        for layer in range(len(rest) // 2):
            cache.update(rest[2 * layer], rest[2 * layer + 1], layer)
        found = self.model(**given, past_key_values=cache, use_cache=True)
        states = [
            each for layer in found.past_key_values.layers for each in (layer.keys, layer.values)
        ]
        return (getattr(found, self.output), *states)


class _Parts(torch.nn.Module):
    """A model of torchvision whose results are in dictionaries."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        results = self.model(x)
        if isinstance(results, dict):
            return list(results.values())
        return [value for result in results for value in result.values()]


def make(model: Model) -> Made:
    """Return a model's module with random weights."""
    torch.manual_seed(0)
    if model.package == "transformers":
        made = _transformer(model.name)
    else:
        package = importlib.import_module(model.package)
        if model.package == "timm":
            module = package.create_model(model.name, pretrained=False, **model.options)
        else:
            is_in_parts = model.name.startswith(_IN_PARTS)
            backbone = {"weights_backbone": None} if is_in_parts else {}
            module = package.models.get_model(model.name, weights=None, **backbone, **model.options)
            module = _Parts(module) if is_in_parts else module
        made = Made(module, {"x": torch.randn(model.shape)}, {"x": model.open_axes})
    made.module.eval()
    enliven(made.module, tuple(made.inputs.values()))
    return made


def enliven(module: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> None:
    """Give a new module weights by which every layer changes the outputs.

    New modules have heads of zeros, layers that are scaled by a millionth, and normalisations
    for other data, by which values vanish or overflow: errors would not be seen.
    """
    with torch.no_grad():
        for weight in module.parameters():
            if weight.is_floating_point() and float(weight.max() - weight.min()) == 0.0:
                weight.add_(_NOISE * torch.randn_like(weight))
        kinds = torch.nn.modules.batchnorm._BatchNorm
        found = [each for each in module.modules() if isinstance(each, kinds)]
        for each in found:
            each.train()
            each.momentum = None  # an average of all that it has seen
            each.reset_running_stats()
        if found:
            module(*(torch.randn(_BATCH, *each.shape[1:]) for each in inputs))
    module.eval()


def _transformer(name: str) -> Made:
    if name in ("clip_vision", "segformer", "yolos", "dinov2"):
        return _vision(name)
    return _sound(name) if name in ("whisper_encoder", "wav2vec2", "encodec") else _text(name)


def _text(name: str) -> Made:
    hf = importlib.import_module("transformers")
    kind, cached, _ = name.partition("_cache")
    common = {
        "vocab_size": _VOCABULARY,
        "hidden_size": _WIDTH,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "intermediate_size": 2 * _WIDTH,
        "attn_implementation": "sdpa",
    }
    few_heads = common | {"num_key_value_heads": _HEADS // 2, "max_position_embeddings": 64}
    positions = {"relative_attention": True, "position_buckets": 16, "pos_att_type": ["c2p", "p2c"]}
    makers = {
        "bert": lambda: hf.BertForSequenceClassification(hf.BertConfig(**common)),
        "distilbert": lambda: hf.DistilBertForSequenceClassification(
            hf.DistilBertConfig(
                vocab_size=_VOCABULARY, dim=_WIDTH, n_layers=_LAYERS, n_heads=_HEADS, hidden_dim=128
            )
        ),
        "deberta_v2": lambda: hf.DebertaV2ForSequenceClassification(
            hf.DebertaV2Config(**(common | positions | {"attn_implementation": "eager"}))
        ),
        "t5_encoder": lambda: hf.T5EncoderModel(
            hf.T5Config(
                vocab_size=_VOCABULARY, d_model=_WIDTH, d_kv=16, d_ff=128, num_layers=2, num_heads=4
            )
        ),
        "gpt2": lambda: hf.GPT2LMHeadModel(
            hf.GPT2Config(vocab_size=_VOCABULARY, n_embd=_WIDTH, n_layer=_LAYERS, n_head=_HEADS)
        ),
        "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**few_heads)),
        "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**few_heads)),
        "mobilebert": lambda: hf.MobileBertForSequenceClassification(
            hf.MobileBertConfig(**(common | {"embedding_size": 32, "intra_bottleneck_size": 32}))
        ),
        "mamba": lambda: hf.MambaForCausalLM(
            hf.MambaConfig(vocab_size=_VOCABULARY, hidden_size=_WIDTH, num_hidden_layers=_LAYERS)
        ),
    }
    model = makers[kind]()
    output = "last_hidden_state" if kind == "t5_encoder" else "logits"
    words = torch.randint(0, _VOCABULARY, (1, 1 if cached else _WORDS))
    open_axes: dict[str, dict[int, str]] = {}
    if not cached:
        inputs = {"input_ids": words, "attention_mask": torch.ones_like(words)}
        open_axes = {key: {0: "batch", 1: "length"} for key in inputs}
    else:
        inputs = {
            "input_ids": words,
            "attention_mask": torch.ones(1, _CACHED + 1, dtype=torch.int64),
        }
        open_axes = {"input_ids": {0: "batch"}, "attention_mask": {0: "batch"}}
        heads = _HEADS if kind == "gpt2" else _HEADS // 2
        for layer in range(_LAYERS):
            for part in ("key", "value"):
                state = f"past_{part}_{layer}"
                inputs[state] = torch.randn(1, heads, _CACHED, _WIDTH // _HEADS)
                open_axes[state] = {0: "batch"}
    return Made(Tensors(model, ("input_ids", "attention_mask"), output), inputs, open_axes)


def _vision(name: str) -> Made:
    hf = importlib.import_module("transformers")
    common = {
        "hidden_size": _WIDTH,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "intermediate_size": 2 * _WIDTH,
        "patch_size": 16,
    }
    makers = {
        "clip_vision": lambda: hf.CLIPVisionModel(hf.CLIPVisionConfig(image_size=64, **common)),
        "segformer": lambda: hf.SegformerForSemanticSegmentation(
            hf.SegformerConfig(depths=[1, 1, 1, 1], num_labels=8)
        ),
        "dinov2": lambda: hf.Dinov2Model(
            hf.Dinov2Config(image_size=98, **(common | {"patch_size": 14}))
        ),
        "yolos": lambda: hf.YolosForObjectDetection(
            hf.YolosConfig(image_size=[64, 64], num_detection_tokens=10, num_labels=8, **common)
        ),
    }
    output = "pooler_output" if name in ("clip_vision", "dinov2") else "logits"
    inputs = {"pixel_values": torch.randn(1, 3, 64, 64)}
    return Made(
        Tensors(makers[name](), tuple(inputs), output), inputs, {"pixel_values": {0: "batch"}}
    )


def _sound(name: str) -> Made:
    hf = importlib.import_module("transformers")
    if name == "whisper_encoder":
        config = hf.WhisperConfig(
            d_model=_WIDTH,
            encoder_layers=_LAYERS,
            encoder_attention_heads=_HEADS,
            encoder_ffn_dim=2 * _WIDTH,
            decoder_attention_heads=_HEADS,
            max_source_positions=_FRAMES // 2,
        )
        model = hf.WhisperModel(config).encoder
        inputs = {"input_features": torch.randn(1, config.num_mel_bins, _FRAMES)}
        return Made(
            Tensors(model, tuple(inputs), "last_hidden_state"),
            inputs,
            {"input_features": {0: "batch"}},
        )
    if name == "encodec":
        config = hf.EncodecConfig(num_filters=8, hidden_size=32, codebook_size=64, codebook_dim=32)
        inputs = {"input_values": torch.randn(1, 1, 1280)}
        module = Tensors(hf.EncodecModel(config), tuple(inputs), "audio_values")
        return Made(module, inputs, {"input_values": {0: "batch"}})
    config = hf.Wav2Vec2Config(
        vocab_size=32,
        hidden_size=_WIDTH,
        num_hidden_layers=_LAYERS,
        num_attention_heads=_HEADS,
        intermediate_size=2 * _WIDTH,
        conv_dim=(32,) * 7,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
    )
    inputs = {"input_values": torch.randn(1, 4000)}
    open_axes = {"input_values": {0: "batch", 1: "length"}}
    return Made(Tensors(hf.Wav2Vec2ForCTC(config), tuple(inputs), "logits"), inputs, open_axes)


def export(made: Made, way: str, folder: Path) -> tuple[Path, dict[str, tuple[int, ...]]]:
    """Export a module; return the file and the shapes that its open inputs are to have."""
    exporter, is_open = EXPORTS[way]
    values = tuple(made.inputs.values())
    if is_open and exporter != "script":
        values = tuple(
            torch.cat([value] * _OPEN_BATCH) if 0 in made.open_axes[name] else value
            for name, value in made.inputs.items()
        )
    shapes = made.shapes if is_open else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if exporter == "script":
            axes = {"dynamic_axes": made.open_axes} if is_open else {}
            return _to_onnx(made, values, folder, dynamo=False, **axes), shapes
        dims = None
        if is_open:
            dynamic = torch.export.Dim.DYNAMIC
            each = tuple(dict.fromkeys(axes, dynamic) for axes in made.open_axes.values())
            dims = (each,) if isinstance(made.module, Tensors) else each
        if exporter == "dynamo":
            return _to_onnx(made, values, folder, dynamo=True, dynamic_shapes=dims), shapes
        program = torch.export.export(made.module, values, dynamic_shapes=dims)
        path = folder / "net.pt2"
        torch.export.save(program, path)
        names = program.graph_signature.user_inputs
        return path, dict(zip(names, shapes.values(), strict=False))


def _to_onnx(made: Made, values: tuple[torch.Tensor, ...], folder: Path, **how: Any) -> Path:
    path = folder / "net.onnx"
    names = list(made.inputs)
    torch.onnx.export(made.module, values, str(path), input_names=names, verbose=False, **how)
    return path
