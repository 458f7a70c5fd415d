"""Start a command's fork server before the command itself imports TVM: both take seconds."""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn

from tvm_adaptive.errors import UnsupportedVersionError
from tvm_adaptive.workers.fork_server import ForkServer
from tvm_adaptive.workers.main import hidden

# The modules of the functions that workers run, by stage: reading, untuned, search, play-off.
RUN_MODULES = (
    "tvm_adaptive.models.frontend.reader",
    "tvm_adaptive.models",
    "tvm_adaptive.builder.compile",
    "tvm_adaptive.runner.rpc.lease",
    "tvm_adaptive.runner.playoff.worker",
)
_PACKAGE = "tvm_adaptive"
_SCRIPT = "tvm-adaptive"
_DOCTOR = "doctor"
# The codes of the commands: a problem that "doctor" finds, what cannot be used, an interrupt.
_EXIT_PROBLEM, _EXIT_UNUSABLE, _EXIT_INTERRUPTED = 1, 2, 130
# Commands that fork workers.
_COMMANDS = ("tune", "apply")


def command_of(arguments: Sequence[str], original: Sequence[str]) -> str:
    """Return which of our commands a process runs; "" if another program imports the package.

    ``arguments`` and ``original`` are ``sys.argv`` and ``sys.orig_argv`` while it is imported.
    """
    program = arguments[0] if arguments else ""
    is_script = program.replace("\\", "/").rpartition("/")[2] == _SCRIPT
    # Python writes the module's path there only after it has found it.
    is_module = program == "-m" and ("-m", _PACKAGE) in itertools.pairwise(original)
    return arguments[1] if (is_script or is_module) and len(arguments) > 1 else ""


@functools.cache
def early_server() -> ForkServer | None:
    """Return the server that this process started first; None if it is no command of ours."""
    if command_of(sys.argv, sys.orig_argv) not in _COMMANDS:
        return None
    server = ForkServer(RUN_MODULES)
    with contextlib.suppress(OSError):  # it is tried again when a worker is needed
        server.start()
    return server


@contextlib.contextmanager
def early_start() -> Iterator[None]:
    """Import the package inside: a command's server starts, and TVM does not import PyTorch.

    TVM only learns PyTorch's types from it, which no command gives to TVM. A command that is
    interrupted, or that finds versions of TVM that do not work together, ends as it would later:
    without a traceback. The import of another program is left as it is.
    """
    command = command_of(sys.argv, sys.orig_argv)
    if not command:
        early_server()
        yield
        return
    try:
        early_server()
        with hidden("torch"):
            yield
    except UnsupportedVersionError as error:
        _refuse_versions(command, error)
    except KeyboardInterrupt:
        raise SystemExit(_EXIT_INTERRUPTED) from None


def _refuse_versions(command: str, error: UnsupportedVersionError) -> NoReturn:
    """End a command that cannot import TVM with one line, which has the fix."""
    is_doctor = command == _DOCTOR
    stream, head = sys.stderr, "tvm-adaptive: error: "
    if is_doctor:
        stream, head = sys.stdout, "PROBLEM  versions  "
    with contextlib.suppress(OSError, AttributeError):  # it is closed, or was from the beginning
        stream.write(f"{head}{error}\n")
    raise SystemExit(_EXIT_PROBLEM if is_doctor else _EXIT_UNUSABLE) from None
