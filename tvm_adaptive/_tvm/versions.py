"""Check that the installed apache-tvm and apache-tvm-ffi work together, before any import."""

from __future__ import annotations

from importlib import metadata

from tvm_adaptive.errors import UnsupportedVersionError

# Tested one by one: TVMs of this range have all names that this package binds.
TVM_RANGE = ((0, 26), (0, 28))
# 0.1.15 ends the process with a segmentation fault when a TuneContext gets a space
# generator; before 0.1.14.post0 TVM 0.27 does not load.
FFI_RANGE = ((0, 1, 14), (0, 1, 15))
FIX = 'pip install "apache-tvm>=0.26,<0.28" "apache-tvm-ffi>=0.1.14.post0,<0.1.15"'


def check_versions(tvm: str | None, ffi: str | None) -> None:
    """Raise unless the two versions are known to work together."""
    is_known = tvm is not None and _within(tvm, TVM_RANGE)
    # Of 0.1.14, its later releases only.
    is_known &= ffi is not None and _within(ffi, FFI_RANGE) and ".post" in ffi
    if not is_known:
        raise UnsupportedVersionError(
            "tvm_adaptive needs apache-tvm 0.26 or 0.27 with apache-tvm-ffi 0.1.14.post0 or later, "
            f"below 0.1.15, but found apache-tvm {tvm or '(not installed)'} and apache-tvm-ffi "
            f"{ffi or '(not installed)'}; other pairs crash. To mend it: {FIX}"
        )


def installed_version(distribution: str) -> str | None:
    """Return the installed version of a distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def release(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: ``"0.1.14.post1"`` is ``(0, 1, 14)``."""
    numbers = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _within(version: str, bounds: tuple[tuple[int, ...], tuple[int, ...]]) -> bool:
    low, high = bounds
    return low <= release(version) < high
