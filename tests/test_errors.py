import errno

import pytest

from tvm_adaptive.errors import MACHINE_FAILURE, is_machine_failure, machine_failure, summary_line


@pytest.mark.parametrize(
    ("error", "line"),
    [
        ("", "unknown error"),
        ("Runner: timeout\nmore", "Runner: timeout"),
        ("Traceback (most recent call last):\n  File\nValueError: x\n", "ValueError: x"),
        ("job failed:\nTraceback (most recent call last):\nKeyError: 1", "KeyError: 1"),
        ("Runner: Error: Traceback (most recent call last):\n  f\nKeyError: 1", "KeyError: 1"),
        (ValueError("\n first\nsecond"), "first"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
    ],
)
def test_the_line_that_says_most(error, line):
    assert summary_line(error) == line


@pytest.mark.parametrize(
    ("message", "expected"),
    [(None, False), ("", False), ("machine", False), (f"{MACHINE_FAILURE}no room", True)],
)
def test_a_machines_failure_is_identified_by_its_first_words(message, expected):
    assert is_machine_failure(message) == expected


def led_to(error, cause):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (MemoryError(), "MemoryError"),
        (OSError(errno.ENOSPC, "disk full"), "OSError: [Errno 28] disk full"),
        (BlockingIOError(errno.EAGAIN, "no fork"), "BlockingIOError: [Errno 11] no fork"),
        (led_to(RuntimeError("link"), OSError(errno.EMFILE, "x")), "OSError: [Errno 24] x"),
        (
            RuntimeError("ld failed\nld: a.so: No space left on device\nstop"),
            "RuntimeError: ld: a.so: No space left on device",
        ),
        (
            RuntimeError("Check failed: (e == cudaSuccess) is false: CUDA: out of memory"),
            "RuntimeError: Check failed: (e == cudaSuccess) is false: CUDA: out of memory",
        ),
        (RuntimeError("std::bad_alloc"), "RuntimeError: std::bad_alloc"),
        (RuntimeError("CUDA: an illegal memory access was encountered"), ""),
        (FileNotFoundError(errno.ENOENT, "gone"), ""),
        (RuntimeError("recv: Resource temporarily unavailable"), ""),
        (led_to(RuntimeError("a"), ValueError("b")), ""),
    ],
)
def test_what_the_machine_could_not_do(error, line):
    assert machine_failure(error) == line


def test_exceptions_in_a_circle():
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert machine_failure(first) == ""
