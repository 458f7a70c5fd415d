"""Small programs that load a compiled model and run it once, in Python and in C++.

They need TVM's runtime and nothing of this package.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import NamedTuple


class Argument(NamedTuple):
    """What a compiled function takes."""

    name: str
    shape: tuple[int, ...]
    dtype: str


_PYTHON_HEAD = '''"""Run $library once, on made-up inputs. Needs: pip install $pins numpy

All physical cores are used when TVM_NUM_THREADS is set to their number.
"""

from pathlib import Path

import numpy as np
import tvm

LIBRARY = Path(__file__).with_name("$library")
$arguments_comment
ARGUMENTS = [
$arguments
]


def made_up(rng, shape, dtype):
    if dtype.startswith("float"):
        return rng.standard_normal(shape).astype(dtype)
    return rng.integers(0, 2, shape).astype(dtype)


device = tvm.device("$device", 0)
rng = np.random.default_rng(0)
values = [made_up(rng, shape, dtype) for _, shape, dtype in ARGUMENTS]
tensors = [tvm.runtime.tensor(value, device=device) for value in values]
'''

_PYTHON_NETWORK = """library = tvm.runtime.load_module(str(LIBRARY))
machine = tvm.runtime.vm.VirtualMachine(library, device)
result = machine["main"](*tensors)
outputs = [result] if hasattr(result, "numpy") else list(result)
for output in outputs:
    print(output.shape, output.dtype, output.numpy().ravel()[:4])
"""

_PYTHON_FUNCTION = """module = tvm.runtime.load_module(str(LIBRARY))
module[module.entry_name](*tensors)
for (name, shape, dtype), tensor in zip(ARGUMENTS, tensors):
    print(name, shape, dtype, tensor.numpy().ravel()[:4])
"""

_CPP = """// Runs $library once, on zeros. Needs TVM's runtime, as its wheels have it:
//
//   tvm=$$(python -c 'import os, tvm; print(os.path.dirname(tvm.__file__))')
//   c++ -std=c++17 example.cc $$(tvm-ffi-config --cxxflags) \\
//     $$(tvm-ffi-config --ldflags) $$(tvm-ffi-config --libs) \\
//     -L$$tvm/lib -Wl,--no-as-needed -ltvm_runtime \\
//     -Wl,-rpath,$$tvm/lib:$$(tvm-ffi-config --libdir) -o example
//   ./example

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/function.h>

#include <cstdlib>
#include <cstring>
#include <iostream>

namespace ffi = tvm::ffi;

// TVM's code takes vectors from memory that begins on a cache line.
struct Aligned {
  void AllocData(DLTensor* tensor) {
    size_t size = (ffi::GetDataSize(*tensor) + 63) / 64 * 64;
    tensor->data = std::aligned_alloc(64, size);
    std::memset(tensor->data, 0, size);
  }
  void FreeData(DLTensor* tensor) { std::free(tensor->data); }
};

ffi::Tensor Zeros(ffi::Shape shape, const char* dtype) {
  return ffi::Tensor::FromNDAlloc(Aligned(), shape, ffi::StringToDLDataType(dtype),
                                  DLDevice{kDLCPU, 0});
}

void Print(const ffi::Tensor& output) {
  std::cout << "output";
  for (int64_t extent : output.shape()) std::cout << " " << extent;
  std::cout << std::endl;
}

int main(int argc, char** argv) {
  ffi::Module library = ffi::Module::LoadFromFile(argc > 1 ? argv[1] : "./$library");
  ffi::Module machine =
      library->GetFunction("vm_load_executable").value()().cast<ffi::Module>();
  constexpr int kPooled = 2;
  machine->GetFunction("vm_initialization")
      .value()(static_cast<int>(kDLCPU), 0, kPooled);
  ffi::Any result = machine->GetFunction("main").value()(
$arguments);
  if (auto output = result.as<ffi::Tensor>()) {
    Print(*output);
  } else {
    for (const ffi::Tensor& each : result.cast<ffi::Array<ffi::Tensor>>()) Print(each);
  }
  return 0;
}
"""


def network_example(library: str, arguments: Sequence[Argument], device: str, pins: str) -> str:
    """Return a Python program that runs a network."""
    comment = "# The inputs, in their order: name, shape, type."
    head = _python_head(library, arguments, device, pins, comment)
    return head + _PYTHON_NETWORK


def function_example(library: str, arguments: Sequence[Argument], device: str, pins: str) -> str:
    """Return a Python program that runs an operator; parameters as for a network."""
    comment = "# The buffers, in their order: inputs, and what is written."
    head = _python_head(library, arguments, device, pins, comment)
    return head + _PYTHON_FUNCTION


def cpp_example(library: str, arguments: Sequence[Argument]) -> str:
    """Return a C++ program that runs a network on the CPU; parameters as in Python."""
    lines = [
        f'      Zeros({{{", ".join(str(extent) for extent in each.shape)}}}, "{each.dtype}")'
        for each in arguments
    ]
    return string.Template(_CPP).substitute(library=library, arguments=",\n".join(lines))


def _python_head(
    library: str, arguments: Sequence[Argument], device: str, pins: str, comment: str
) -> str:
    lines = [f"    ({each.name!r}, {each.shape!r}, {each.dtype!r})," for each in arguments]
    return string.Template(_PYTHON_HEAD).substitute(
        library=library,
        arguments="\n".join(lines),
        arguments_comment=comment,
        device=device,
        pins=pins,
    )
