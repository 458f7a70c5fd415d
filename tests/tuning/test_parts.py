from __future__ import annotations

import contextlib
import dataclasses

import pytest

from tvm_adaptive.measure_callback.journal import NullJournal
from tvm_adaptive.tuning.config import DEFAULT, SearchConfig
from tvm_adaptive.tuning.parts import make_parts
from tvm_adaptive.tuning.target import n_cores_of, resolve_target


def test_stocks_builder_has_time_to_import_what_it_imports(tmp_path):
    target = resolve_target("cpu")
    measure = dataclasses.replace(DEFAULT.measure, build_timeout_sec=7.0)
    parts = make_parts(
        DEFAULT.replace(builder="local", measure=measure),
        target=target,
        work_dir=tmp_path,
        seed=0,
        journal=NullJournal(),
        should_stop=lambda: False,
    )
    with contextlib.closing(parts):
        # Three times the half minute that two quiet cores need.
        assert parts.builder.timeout_sec >= 7.0 + 90.0
        assert parts.builder.max_workers == n_cores_of(target)


@pytest.mark.parametrize(
    ("changes", "takes_seeds"),
    [
        ({}, True),
        ({"strategy": "evolutionary"}, False),
        ({"search": SearchConfig(proposer="evolution")}, False),
        ({"search": SearchConfig(seeds=False)}, False),
    ],
)
def test_only_a_search_on_decisions_is_told_of_relatives(tmp_path, changes, takes_seeds):
    parts = make_parts(
        DEFAULT.replace(**changes),
        target=resolve_target("cpu"),
        work_dir=tmp_path,
        seed=0,
        journal=NullJournal(),
        should_stop=lambda: False,
    )
    with contextlib.closing(parts):
        assert (parts.transfer_pool is not None) == takes_seeds
