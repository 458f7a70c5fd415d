from __future__ import annotations

import dataclasses
import math

import pytest

from tvm_adaptive.report.comparison import comparison_lines, peer_lines
from tvm_adaptive.tuning.outcome import Comparison, PeerTiming

SAME = Comparison(before_sec=0.004, after_sec=0.002, max_abs=1e-6, max_rel=2e-5, agree=True)


def peer(secs, tuned_secs, agree=True):
    name = "ONNX Runtime 1.32.0"
    return PeerTiming("ort", name, 2, tuple(secs), tuple(tuned_secs), 1e-6, 2e-5, agree)


@pytest.mark.parametrize(
    ("secs", "tuned_secs", "words", "times"),
    [
        (
            [0.002, 0.003],
            [0.001, 0.001],
            "2.50 x faster than",
            "1.00 ms, was 2.50 ms; 2.00 to 3.00",
        ),
        ([0.1], [0.25], "2.50 x slower than", "250 ms, was 100 ms; 2.50 to 2.50"),
        ([0.012], [0.012], "as fast as", "12.0 ms, was 12.0 ms; 1.00 to 1.00"),
        ([0.09997], [0.09994], "as fast as", "99.9 ms, was 100 ms; 1.00 to 1.00"),
    ],
)
def test_a_framework_is_compared_in_one_line(secs, tuned_secs, words, times):
    (line,) = peer_lines([peer(secs, tuned_secs)])
    rounds = f"{len(secs)} round{'s' if len(secs) > 1 else ''}"
    assert line == f"{words} ONNX Runtime 1.32.0 (2 threads): {times} x in {rounds}"


def test_outputs_that_differ_are_reported_beside_the_speed():
    (line,) = peer_lines([peer([0.002], [0.001], agree=False)])
    assert line.endswith("; its outputs differ")


def test_latency_is_reported_where_no_framework_was_timed():
    latency, outputs = comparison_lines(SAME)
    assert latency == "latency       4.000 ms untuned, 2.000 ms tuned, 2.0 x faster"
    assert outputs.endswith("agree; largest difference 1e-06 absolute, 2e-05 relative")
    untimed = dataclasses.replace(SAME, before_sec=math.inf)
    assert comparison_lines(untimed)[0] == "latency       2.000 ms tuned"
    timed = peer([0.002], [0.001])
    compared = dataclasses.replace(SAME, framework=timed.framework, peers=(timed,))
    (line,) = comparison_lines(compared)
    assert "agree with ONNX Runtime 1.32.0" in line


def test_a_wrong_result_is_not_to_be_used():
    wrong = dataclasses.replace(SAME, agree=False, framework="torch", problem="output 0 is NaN")
    lines = comparison_lines(wrong)
    assert "DISAGREE: do not use this result" in lines[-2]
    assert "with torch" not in lines[-2]
    assert lines[-1] == "  output 0 is NaN"
