import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.tuning.config import (
    DEFAULT,
    PAPER,
    FinishConfig,
    MeasureConfig,
    ModelConfig,
    SchedulerConfig,
    SearchConfig,
    TuneConfig,
    preset,
)
from tvm_adaptive.tuning.config_file import config_of_fields
from tvm_adaptive.tuning.session import RunOptions


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"n_trials_per_round": 16.0}, "n_trials_per_round must be int but got 16.0"),
        ({"lanes": True}, "lanes must be int but got True"),
        ({"seeds": 1}, "seeds must be bool but got 1"),
        ({"epsilon": "0.1"}, "epsilon must be float or none but got '0.1'"),
        ({"ray": 1}, "ray must be str or none but got 1"),
    ],
)
def test_values_of_another_type_are_refused(options, text):
    with pytest.raises(InvalidOptionError, match=text):
        SearchConfig(**options)


def test_devices_are_a_text():
    with pytest.raises(InvalidOptionError, match=r"devices must be str but got \(0, 1\)"):
        MeasureConfig(devices=(0, 1))
    with pytest.raises(InvalidOptionError, match="name one twice"):
        MeasureConfig(devices="0,1,0")


def test_numbers_of_numpy_are_written_as_numbers():
    config = DEFAULT.replace(
        search=SearchConfig(n_trials_per_round=np.int64(32), epsilon=np.float32(0.25)),
        finish=FinishConfig(max_task_sec=2),
        store=Path("records.db"),
    )
    assert config_of_fields(json.loads(json.dumps(dataclasses.asdict(config))), "it") == config
    assert (config.search.epsilon, config.store) == (0.25, "records.db")
    assert isinstance(config.finish.max_task_sec, float)


def test_bounds_and_seed_of_a_run_have_their_types(tmp_path):
    given = {"trials": np.int64(8), "seed": np.uint32(3), "budget_sec": np.float32(0.5)}
    options = RunOptions(what="te:GMM", work_dir=tmp_path, until_ms=2, **given)
    bounds = (options.trials, options.seed, options.budget_sec, options.until_ms)
    assert json.dumps(bounds) == "[8, 3, 0.5, 2.0]"
    with pytest.raises(InvalidOptionError, match=r"trials must be int or none but got 1000\.0"):
        RunOptions(what="te:GMM", work_dir=tmp_path, trials=1e3)


def test_presets_by_name():
    assert preset("default") is DEFAULT
    assert preset("paper") is PAPER
    assert PAPER.measure.rule == "paper"
    assert PAPER.model == ModelConfig(
        n_trees=10, std="between-tree", max_features=10, target="throughput"
    )


def test_an_unknown_preset_lists_the_known():
    with pytest.raises(InvalidOptionError, match="Unknown preset 'fast'; possible are default, "):
        preset("fast")


def test_replace_ignores_none_and_refuses_unknown():
    changed = DEFAULT.replace(cost_model="xgb", strategy=None)
    assert (changed.cost_model, changed.strategy) == ("xgb", DEFAULT.strategy)
    with pytest.raises(InvalidOptionError, match="Unknown option speed; possible are builder"):
        DEFAULT.replace(speed=9)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: SearchConfig(n_trials_per_round=0), "n_trials_per_round must be at least 1"),
        (lambda: SearchConfig(population_size=0), "population_size must be at least 1"),
        (lambda: SearchConfig(genetic_num_iters=-1), "genetic_num_iters must be at least 0"),
        (lambda: ModelConfig(n_trees=0), "n_trees must be at least 2"),
        (lambda: MeasureConfig(timeout_sec=0), "timeout_sec must be above 0"),
        (lambda: MeasureConfig(build_timeout_sec=-1), "build_timeout_sec must be above 0"),
        (lambda: SchedulerConfig(preset="x"), "preset must be default or paper but got 'x'"),
        (lambda: SchedulerConfig(slot_rounds=0), "slot_rounds must be at least 1"),
        (lambda: SchedulerConfig(slot_sec=0), "slot_sec must be above 0"),
        (lambda: SchedulerConfig(warm_up_trials=0), "warm_up_trials must be at least 1"),
        (lambda: SchedulerConfig(patience_trials=0), "patience_trials must be at least 1"),
        (lambda: SchedulerConfig(plateau_slots=0), "plateau_slots must be at least 1"),
        (lambda: SchedulerConfig(plateau_share=1.0), r"plateau_share must be in \[0, 1\)"),
        (lambda: FinishConfig(top_k=0), "top_k must be at least 1"),
        (lambda: FinishConfig(rtol=0.0), "rtol must be above 0"),
    ],
)
def test_values_out_of_range_are_refused(make, text):
    with pytest.raises(InvalidOptionError, match=text):
        make()


def test_configurations_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign"):
        TuneConfig().layout = "keep"
