"""Link a candidate's objects in a few milliseconds, for kernels that run on this machine.

TVM links an archive when it loads it, by the compiler's driver: 26 ms per candidate in the
process that measures, while nothing else may run. The linker alone takes 3 ms, in a build
worker beside others.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

from tvm_adaptive._tvm import create_shared

_TIMEOUT_SEC = 60.0


def link_shared(output: str, objects: Sequence[str] | str, options: Any = None, **_: Any) -> None:
    """Link objects to a shared library; ``fcompile`` of ``export_library``.

    The process that loads the library has TVM's runtime and the C library. The compiler's
    driver handles sources and options, and links if there is no linker or it fails.
    """
    paths = [objects] if isinstance(objects, str) else list(objects)
    linker = shutil.which("ld")
    if linker and not options and all(path.endswith(".o") for path in paths):
        command = [linker, "-shared", "-o", output, *paths, *_libraries()]
        done = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_SEC, check=False)
        if done.returncode == 0:
            return
    create_shared(output, paths, options=options)


@functools.lru_cache(maxsize=1)
def _libraries() -> tuple[str, ...]:
    """Return the paths of libm and libgcc, as the compiler says once per worker.

    libgcc has conversions of half precision and 128-bit division, and is static.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return ()
    found = []
    for question in ("-print-file-name=libm.so", "-print-libgcc-file-name"):
        asked = subprocess.run(
            [compiler, question], capture_output=True, text=True, timeout=_TIMEOUT_SEC, check=False
        )
        path = asked.stdout.strip()
        # The compiler echoes a name that it does not find.
        if asked.returncode == 0 and "/" in path:
            found.append(path)
    return tuple(found)
