"""A compiled network as a function of this process: arrays in, arrays out, by DLPack."""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tvm_adaptive._tvm import Tensor, VirtualMachine, from_dlpack, start_thread_pool, tensor
from tvm_adaptive._tvm.threads import share_threads
from tvm_adaptive.errors import InvalidOptionError, as_invalid_option, check_at_least
from tvm_adaptive.values.agreement import item_bytes, random_array
from tvm_adaptive.workers import device_session

logger = logging.getLogger(__name__)

# Kernels load vectors from the start of a buffer; TVM's own buffers begin there, too.
_ALIGNMENT_BYTES = 64
# numpy's arrays of it cannot be handed to other libraries.
_NOT_SHARED = "bfloat16"
_DLPACK_CPU = 1  # of the kinds of devices in DLPack
# Of each thread, the process in which its pool of threads was made, and the number it was set to.
_pools = threading.local()
_FORKED = (
    "A fork copies none of its threads: make and run models after the fork and not before, or "
    'start processes by "spawn".'
)


class CompiledModel:
    """A tuned network that is called like a function.

    Called with one array per input, in the order of :attr:`input_shapes` or by their names,
    it returns its output, or a tuple of several. Outputs are of the kind of the inputs:
    numpy arrays (also for lists of numbers), PyTorch tensors, or TVM tensors for other objects
    with ``__dlpack__``.

    Guarantees:

    - Shapes and types are fixed. Others raise InvalidOptionError before any kernel runs.
    - Inputs are not changed. They are copied only if they are not contiguous, do not begin at
      a multiple of 64 bytes, or cannot be shared (read-only numpy arrays). Outputs are not
      copied, unless they are memory of another one or numpy is older than 2.1. No later call
      writes to them.
    - Calls from several threads are safe; one runs at a time. Each calling thread has a pool
      of threads of TVM's runtime, which is made in its first call, and of which a call uses
      :attr:`n_threads`. If the thread has used TVM before, there may be fewer.
    - Dropped, it gives its weights back; outputs stay valid.
    - It works in the process that made it. In one that was forked from that, calls raise
      InvalidOptionError.

    Parameters
    ----------
    library : path of a ``.so`` or ``.tar``
        A network that this package compiled. It is native code: load only your own.
    input_shapes : mapping of str to sequence of int
        In the order of the network's inputs.
    input_dtypes : mapping of str to str
    n_threads : int
        Threads of a kernel, the caller included.
    example : sequence of numpy arrays or None, default None
        Inputs that the network may be run on, to find out which outputs are memory of its
        inputs. None takes random floats, and zeros for other types.
    keep : object
        Lives as long as the model, such as the folder of the library.
    """

    def __init__(
        self,
        library: str | os.PathLike[str],
        input_shapes: Mapping[str, Sequence[int]],
        input_dtypes: Mapping[str, str],
        *,
        n_threads: int,
        example: Sequence[Any] | None = None,
        keep: object = None,
    ) -> None:
        check_at_least("n_threads", n_threads, 1)
        self.library = Path(library)
        self.input_shapes = {name: tuple(shape) for name, shape in input_shapes.items()}
        self.input_dtypes = dict(input_dtypes)
        self.n_threads = n_threads
        self._keep, self._process = keep, os.getpid()
        self._expected = [(n, self.input_shapes[n], self.input_dtypes[n]) for n in input_shapes]
        self._lock, self._local = threading.Lock(), threading.local()
        self._library = device_session.open_library(os.fspath(library))
        device = device_session.device_of_kind("cpu")
        self._machine = VirtualMachine(self._library.module, device)
        self._main = self._machine["main"]
        self._shared: tuple[int, ...] = ()
        self._shared = self._find_shared_outputs(example or self._made_up())

    def __call__(self, *arrays: Any, **named: Any) -> Any:
        """Run one inference; see the class."""
        if named:
            arrays = self._ordered(arrays, named)
        if len(arrays) != len(self._expected):
            names = ", ".join(self.input_shapes)
            raise InvalidOptionError(
                f"The model takes {len(self._expected)} inputs ({names}) but got {len(arrays)}."
            )
        torch = sys.modules.get("torch")
        is_torch = torch is not None and any(isinstance(each, torch.Tensor) for each in arrays)
        # Lists of numbers, and what only numpy can read, have no DLPack.
        is_numpy = not is_torch and all(
            isinstance(each, (np.ndarray, np.generic)) or not hasattr(each, "__dlpack__")
            for each in arrays
        )
        values = [
            _as_tensor(array, *expected)
            for array, expected in zip(arrays, self._expected, strict=True)
        ]
        outputs = self._run(values)
        if is_torch:
            assert torch is not None
            results = [torch.from_dlpack(each) for each in outputs]
        else:
            results = [_as_array(each) for each in outputs] if is_numpy else outputs
        return results[0] if len(results) == 1 else tuple(results)

    def _ordered(self, arrays: Sequence[Any], named: Mapping[str, Any]) -> tuple[Any, ...]:
        later = list(self.input_shapes)[len(arrays) :]
        if set(later) != set(named):
            raise InvalidOptionError(
                f"Inputs {', '.join(later) or 'none'} are missing but got {', '.join(named)}."
            )
        return (*arrays, *(named[name] for name in later))

    def _run(self, values: Sequence[Any]) -> list[Any]:
        if os.getpid() != self._process:  # a kernel would wait for them without end
            raise InvalidOptionError(f"The model was made in another process. {_FORKED}")
        with self._lock:
            # Another model may have changed it.
            if getattr(_pools, "n_threads", 0) != self.n_threads or _pools.process != self._process:
                self._set_pool()
            result = self._main(*values)
        outputs = [result] if hasattr(result, "shape") else list(result)
        for place in self._shared:
            outputs[place] = tensor(outputs[place].numpy())
        return outputs

    def _set_pool(self) -> None:
        """Let kernels that this thread calls use as many threads as they were tuned for."""
        check_pool()
        _pools.process = os.getpid()
        # Not bound to single cores: the program's own threads need some, too.
        share_threads(self.n_threads)
        _pools.n_threads = self.n_threads
        found = start_thread_pool()
        if found != self.n_threads and not getattr(self._local, "is_warned", False):
            self._local.is_warned = True
            logger.warning(
                "TVM runs kernels of this thread with %d threads instead of %d: it was used "
                "here before with fewer, or the thread may use fewer processors.",
                found,
                self.n_threads,
            )

    def _made_up(self) -> list[Any]:
        rng = np.random.default_rng(0)
        # Zeros for integers: valid indices of any table.
        return [
            random_array(rng, s, t) if t.startswith("float") else np.zeros(s, t)
            for _, s, t in self._expected
        ]

    def _find_shared_outputs(self, example: Sequence[Any]) -> tuple[int, ...]:
        """Return the outputs that are others' memory, such as an input's; each call copies them."""
        inputs = [tensor(each) for each in example]
        first, second = self._run(inputs), self._run(inputs)
        others = [_addresses(each) for each in (*inputs, *second)]
        shared = []
        for place, each in enumerate(map(_addresses, first)):
            if any(_overlap(each, other) for other in others):
                shared.append(place)
            others.append(each)  # later outputs may be views of it
        return tuple(shared)


def check_pool() -> None:
    """Raise InvalidOptionError if a fork has copied this thread's pool, which has no threads."""
    if getattr(_pools, "process", os.getpid()) != os.getpid():
        raise InvalidOptionError(
            f"This process was forked from one that has run a model in this thread. {_FORKED}"
        )


def _as_tensor(array: Any, name: str, shape: tuple[int, ...], dtype: str) -> Any:
    """Return an array as TVM's tensor, without a copy if possible."""
    torch = sys.modules.get("torch")
    known = (np.ndarray, np.generic, Tensor, *(() if torch is None else (torch.Tensor,)))
    if not isinstance(array, known):
        read = _array_of_other if hasattr(array, "__dlpack__") else _array_of_numbers
        array = read(array, name, dtype)
    if isinstance(array, np.generic):
        array = np.asarray(array)
    if tuple(array.shape) != shape or _dtype_name(array.dtype) != dtype:
        raise InvalidOptionError(
            f"Input {name} must be {dtype} of shape {shape} but is {_dtype_name(array.dtype)} "
            f"of shape {tuple(array.shape)}."
        )
    if isinstance(array, np.ndarray):
        is_sharable = dtype != _NOT_SHARED and array.flags.c_contiguous and array.flags.writeable
        if is_sharable and array.ctypes.data % _ALIGNMENT_BYTES == 0:
            return from_dlpack(array)
        return tensor(array)
    if torch is None or not isinstance(array, torch.Tensor):
        return tensor(_as_array(array) if isinstance(array, Tensor) else np.from_dlpack(array))
    if array.device.type != "cpu":
        raise InvalidOptionError(f"Input {name} must be on the CPU but is on {array.device}.")
    array = array.detach().contiguous().resolve_conj().resolve_neg()
    if array.data_ptr() % _ALIGNMENT_BYTES:
        array = array.clone()
    return from_dlpack(array)


def _array_of_other(array: Any, name: str, dtype: str) -> Any:
    """Return what another library holds on the CPU as numpy's array."""
    with as_invalid_option(f"Input {name} cannot be read"):
        kind, _ = array.__dlpack_device__()
        if int(kind) != _DLPACK_CPU:
            raise InvalidOptionError(f"Input {name} must be on the CPU: copy it there first.")
        return np.asarray(array) if dtype == _NOT_SHARED else np.from_dlpack(array)


def _array_of_numbers(numbers: Any, name: str, dtype: str) -> Any:
    """Return a number, or a list of them, as an array of a type that can hold them."""
    try:
        array = np.asarray(numbers, dtype)
        is_held = array.dtype.kind not in "iub" or np.array_equal(array, np.asarray(numbers))
    except (OverflowError, TypeError, ValueError):
        is_held = False
    if not is_held:
        raise InvalidOptionError(f"Input {name} is {dtype}, which cannot hold its numbers.")
    return array


def _as_array(output: Any) -> Any:
    """Return a tensor of TVM's as an array, which shares its memory if possible."""
    if output.dtype == _NOT_SHARED:
        return output.numpy()
    array = np.from_dlpack(output)
    # Before numpy 2.1, what is shared is read-only.
    return array if array.flags.writeable else array.copy()


@functools.cache
def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _addresses(value: Tensor) -> tuple[int, int]:
    """Return where the memory of a tensor begins and ends."""
    start: int = value.data_ptr()
    return start, start + value.numel() * item_bytes(str(value.dtype))


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] < other[1] and other[0] < one[1]
