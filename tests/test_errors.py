import pytest

from tvm_adaptive.errors import essence


@pytest.mark.parametrize(
    ("error", "line"),
    [
        ("", "unknown error"),
        ("Runner: timeout\nmore", "Runner: timeout"),
        ("Traceback (most recent call last):\n  File\nValueError: x\n", "ValueError: x"),
        ("job failed:\nTraceback (most recent call last):\nKeyError: 1", "KeyError: 1"),
        (ValueError("\n first\nsecond"), "first"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
    ],
)
def test_the_line_that_says_most(error, line):
    assert essence(error) == line
