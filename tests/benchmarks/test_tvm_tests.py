from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tvm.s_tir import meta_schedule as ms

import tvm_adaptive
from benchmarks.tvm_tests.__main__ import excluded_table, table
from benchmarks.tvm_tests.parts import CLASSES, NAMES, ours_in_place
from benchmarks.tvm_tests.plugin import (
    COLLECTION,
    EXCLUDED,
    EXCLUDED_TESTS,
    OURS,
    STOCK,
    TestLog,
    read,
)

CLASSES_OF_OURS = {
    "XGBModel": tvm_adaptive.RFEICostModel,
    "EvolutionarySearch": tvm_adaptive.AdaptiveSearch,
    "LocalRunner": tvm_adaptive.AdaptiveRunner,
    "LocalBuilder": tvm_adaptive.PersistentBuilder,
    "GradientBased": tvm_adaptive.AdaptiveScheduler,
    "RoundRobin": tvm_adaptive.AdaptiveScheduler,
}


def outcomes(**names: str) -> dict[str, dict[str, Any]]:
    return {name: {"outcome": outcome} for name, outcome in names.items()}


def write(path: Path, *events: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


@pytest.mark.parametrize("name", CLASSES_OF_OURS)
def test_a_class_of_stocks_makes_ours_until_the_end(name: str) -> None:
    module, part, _, _ = CLASSES[name]
    stock = getattr(getattr(ms, module), name)
    made: set[str] = set()
    with ours_in_place(made):
        assert isinstance(getattr(getattr(ms, module), name)(), CLASSES_OF_OURS[name])
        assert made == {part}
    assert getattr(getattr(ms, module), name) is stock


def test_a_name_of_stocks_makes_ours_until_the_end() -> None:
    made: set[str] = set()
    with ours_in_place(made):
        builder = ms.Builder.create("local", max_workers=1)
        model = ms.CostModel.create("xgb", num_tuning_cores=1, tree_method="auto")
        assert isinstance(builder, tvm_adaptive.PersistentBuilder)
        assert isinstance(model, tvm_adaptive.RFEICostModel)
        assert isinstance(ms.TaskScheduler.create(), tvm_adaptive.AdaptiveScheduler)
        assert made == {"builder", "cost_model", "task_scheduler"}
        assert isinstance(ms.CostModel.create("random"), ms.cost_model.RandomModel)
    assert isinstance(ms.TaskScheduler.create("gradient"), ms.task_scheduler.GradientBased)


def test_the_first_name_of_a_part_is_tvms_default() -> None:
    assert {part: next(iter(names)) for part, names in NAMES.items()} == {
        "cost_model": "xgb",
        "strategy": "evolutionary",
        "runner": "local",
        "builder": "local",
        "task_scheduler": "gradient",
    }


def test_options_of_stocks_classes_reach_ours() -> None:
    config = ms.runner.EvaluatorConfig(number=1, min_repeat_ms=7, enable_cpu_cache_flush=True)
    with ours_in_place(set()):
        search = ms.search_strategy.EvolutionarySearch(population_size=5, eps_greedy=0.9)
        runner = ms.runner.LocalRunner(timeout_sec=3.0, evaluator_config=config)
        with pytest.raises(TypeError, match="f_build"):
            ms.builder.LocalBuilder(f_build="any")
        with pytest.raises(TypeError, match="extractor"):
            ms.cost_model.XGBModel(extractor=ms.feature_extractor.RandomFeatureExtractor())
    assert (search.options.population_size, search.options.epsilon) == (5, 0.9)
    assert runner.timeout_sec == 3.0
    assert (runner.options.min_repeat_ms, runner.options.cpu_cache_flush) == (7.0, True)


def test_tests_that_did_not_end_are_unfinished(tmp_path: Path) -> None:
    log = write(
        tmp_path / "log",
        {"collected": ["test_a", "test_b"]},
        {"test": "test_a", "outcome": "passed", "parts": ["runner"]},
    )
    assert read(log) == {
        "test_a": {"outcome": "passed", "parts": ["runner"]},
        "test_b": {"outcome": "unfinished"},
    }


def test_a_failure_after_a_test_is_the_tests(tmp_path: Path) -> None:
    passed = {"test": "test_a", "outcome": "passed"}
    failed = {"test": "test_a", "outcome": "failed", "error": "bad"}
    expected = {"test_a": {"outcome": "failed", "error": "bad"}}
    assert read(write(tmp_path / "after", passed, failed)) == expected
    assert read(write(tmp_path / "before", failed, passed)) == expected


def test_a_process_that_wrote_nothing_has_no_tests(tmp_path: Path) -> None:
    assert read(tmp_path / "log") == {}


def test_the_table_names_what_only_ours_fails() -> None:
    files = {
        "test_x.py": {
            "stock": outcomes(a="passed", b="passed", c="failed", d="passed"),
            "ours": {
                "a": {"outcome": "passed", "parts": ["builder"]},
                "b": {"outcome": "failed", "error": "ValueError: no"},
                "c": {"outcome": "failed"},
            },
        },
        "test_y.py": {"stock": outcomes(e="passed"), "ours": outcomes(e="passed")},
        "test_z.py": {"stock": outcomes(f="skipped"), "ours": outcomes(f="skipped")},
    }
    assert table(files).splitlines()[2:] == [
        "| `test_x.py` | 4 | 1 | 3 | 1 | 0 | `b`: ValueError: no; `d`: unfinished |",
        "| 2 files that make none of the parts | 2 | 0 | 1 | 1 | 0 |  |",
        "| all | 6 | 1 | 4 | 2 | 0 | `b`: ValueError: no; `d`: unfinished |",
    ]


def test_excluded_tests_are_named_with_their_reason() -> None:
    test, reason = next(iter(EXCLUDED_TESTS.items()))
    files = {
        "test_x.py": {"stock": {test: {"outcome": "passed"}}, "ours": outcomes(a="passed")},
    }
    files["test_x.py"]["ours"][test] = {"outcome": "excluded"}
    assert f"| {reason} | `{test}` |" in excluded_table(files)
    assert "only ours fails |\n" in table(files)
    assert "| `test_x.py` | 1 | 0 | 1 | 1 | 1 |  |" in table(files)


PLUGIN_FILE = """
import pytest
from tvm.s_tir import meta_schedule as ms

@pytest.mark.skip("Integration test")
def test_lifted():
    assert ms.Builder.create("local", max_workers=1)

@pytest.mark.skip("Disable this test to unblock CI.")
def test_skipped():
    pass

def test_failing():
    assert False, "why"

def test_device():
    assert ms.runner.RunnerInput("path", "llvm", []).device_type == "cpu"

def test_meta_schedule_missing_build_func():
    pass
"""


@pytest.mark.parametrize(("side", "last"), [(STOCK, "passed"), (OURS, EXCLUDED)])
def test_the_plugin_notes_each_test(tmp_path: Path, side: str, last: str) -> None:
    # Modules of this process: each side's have names of their own.
    names = (f"test_sound_{side}.py", f"test_broken_{side}.py")
    (tmp_path / names[0]).write_text(PLUGIN_FILE)
    (tmp_path / names[1]).write_text("import nothing_of_this_name\n")
    log = tmp_path / "log"
    arguments = ["-c", os.devnull, "--rootdir", str(tmp_path), "-p", "no:cacheprovider"]
    for name in names:
        pytest.main([*arguments, str(tmp_path / name)], plugins=[TestLog(log, side)])
    found = read(log)
    assert {name: each["outcome"] for name, each in found.items()} == {
        "test_lifted": "passed",
        "test_skipped": "skipped",
        "test_failing": "failed",
        "test_device": "passed",
        "test_meta_schedule_missing_build_func": last,
        COLLECTION: "failed",
    }
    assert "why" in found["test_failing"]["error"]
    assert found["test_lifted"].get("parts") == (["builder"] if side == OURS else None)
