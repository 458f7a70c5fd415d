"""Models of users: ONNX files, PyTorch programs, factories, saved Relax modules.

Each is imported as a :class:`~tvm_adaptive.models.Network` with its weights, and with the
original to compare outputs with where its framework is installed.
"""

from tvm_adaptive.models.frontend.load import FORMATS, load, slug
from tvm_adaptive.models.frontend.sample import Sample, read_sample, shapes_of_sample, with_sample
from tvm_adaptive.models.frontend.shapes import network_of_imported

__all__ = [
    "FORMATS",
    "Sample",
    "load",
    "network_of_imported",
    "read_sample",
    "shapes_of_sample",
    "slug",
    "with_sample",
]
