"""Models of users: ONNX files, PyTorch programs, factories, saved Relax modules.

Each is imported as a :class:`~tvm_adaptive.models.Network` with its weights, and with the
original to compare outputs with where its framework is installed.
"""

from tvm_adaptive.models.frontend.load import FORMATS, load, slug
from tvm_adaptive.models.frontend.peers import (
    PEERS,
    check_installed,
    open_peer,
    peer_names,
    time_peer,
)
from tvm_adaptive.models.frontend.reader import READER_ENV, ModelReader
from tvm_adaptive.models.frontend.sample import (
    Sample,
    read_sample,
    shapes_of_sample,
    with_sample,
    write_sample,
)
from tvm_adaptive.models.frontend.shapes import network_of_imported
from tvm_adaptive.models.frontend.torch_program import network_of_module, network_of_program

__all__ = [
    "FORMATS",
    "PEERS",
    "READER_ENV",
    "ModelReader",
    "Sample",
    "check_installed",
    "load",
    "network_of_imported",
    "network_of_module",
    "network_of_program",
    "open_peer",
    "peer_names",
    "read_sample",
    "shapes_of_sample",
    "slug",
    "time_peer",
    "with_sample",
    "write_sample",
]
