from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.tuning.config import DEFAULT, PAPER, PRESETS, TuneConfig
from tvm_adaptive.tuning.config_file import parse_config, read_config, write_config


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_what_is_written_reads_back_as_the_same(name: str) -> None:
    assert parse_config(write_config(PRESETS[name])) == PRESETS[name]


def test_every_option_is_written() -> None:
    text = write_config(DEFAULT)
    for field in dataclasses.fields(TuneConfig):
        assert field.name in text
    assert "build_patience = 10.0" in text
    assert 'epsilon = "none"' in text
    assert "race = true" in text


def test_nothing_said_is_the_preset() -> None:
    assert parse_config("") == DEFAULT
    assert parse_config('preset = "paper"') == PAPER


def test_the_former_name_of_a_proposer_is_read() -> None:
    assert parse_config('[search]\nproposer = "distilled"') == DEFAULT


def test_what_is_said_changes_the_preset() -> None:
    config = parse_config(
        """
        preset = "paper"
        cost_model = "xgb"
        [search]
        epsilon = 0.1
        n_trials_per_round = 8
        [measure]
        build_patience = 4     # an integer is a number, too
        [scheduler]
        slot_sec = "none"
        """
    )
    assert config.cost_model == "xgb"
    assert (config.search.epsilon, config.search.n_trials_per_round) == (0.1, 8)
    assert config.search.proposer == PAPER.search.proposer
    assert config.measure.build_patience == 4.0
    assert isinstance(config.measure.build_patience, float)
    assert config.scheduler.slot_sec is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("speed = 9", "there is no option speed; possible are builder"),
        ("[search]\nspeed = 9", r"there is no option search\.speed; possible are diversity"),
        ("search = 9", r"search is a table, as in \[search\]"),
        ("cost_model = 9", "cost_model must be str but got 9"),
        ("[search]\nn_trials_per_round = true", "n_trials_per_round must be int but got True"),
        ("[search]\nn_trials_per_round = 1.5", "n_trials_per_round must be int but got 1.5"),
        ('[search]\nepsilon = "much"', "epsilon must be float or none but got 'much'"),
        ('[search]\nn_trials_per_round = "none"', "n_trials_per_round must be int"),
        ("[search]\nn_trials_per_round = 0", "n_trials_per_round must be at least 1"),
        ('preset = "fast"', "Unknown preset 'fast'"),
        ("preset = 1", "preset must be a name"),
        ("cost_model = ", "is not valid TOML"),
        ("cost_model = [", "is not valid TOML"),
    ],
)
def test_what_cannot_be_is_named(text: str, message: str) -> None:
    with pytest.raises(InvalidOptionError, match=message):
        parse_config(text)


def test_a_file_that_cannot_be_read_is_reported(tmp_path: Path) -> None:
    with pytest.raises(InvalidOptionError, match="cannot be read"):
        read_config(tmp_path / "nowhere.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidOptionError, match="cannot be read"):
        read_config(tmp_path / "binary.toml")


@given(st.text())
def test_any_text_is_a_configuration_or_an_error_of_ours(text: str) -> None:
    try:
        config = parse_config(text)
    except InvalidOptionError:
        return
    assert isinstance(config, TuneConfig)


VALUES = st.one_of(st.integers(), st.floats(), st.booleans(), st.text(max_size=8), st.just("none"))


@given(
    table=st.sampled_from(["search", "model", "measure", "scheduler", "finish"]),
    number=st.integers(0, 5),
    value=VALUES,
)
def test_any_value_is_taken_or_refused_by_name(table: str, number: int, value: object) -> None:
    fields = dataclasses.fields(getattr(DEFAULT, table))
    field = fields[number % len(fields)].name
    if isinstance(value, str):
        written = '"' + "".join(c for c in value if c.isalnum()) + '"'
    elif isinstance(value, bool):
        written = str(value).lower()
    else:
        written = repr(value)
    text = f"[{table}]\n{field} = {written}\n"
    refused = ""
    try:
        config = parse_config(text)
    except InvalidOptionError as error:
        refused = str(error)
    if refused:
        assert field in refused or "TOML" in refused
    elif value == value:  # noqa: PLR0124 - not NaN, which differs from itself
        assert parse_config(write_config(config)) == config
