"""Scheduled products that prefetch their weights: which lines, and with which results."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from tests.models.prefetch.conftest import (
    COLUMNS_INSIDE,
    GROUPS,
    LINE,
    LLVM,
    N_COLUMNS,
    N_ROWS,
    N_SUMMED,
    ROWS_INSIDE,
    TWO_SUMS,
    product,
    record_of_schedule,
    tiled,
)
from tvm_adaptive._tvm import (
    Evaluate,
    For,
    IRModule,
    RemoveWeightLayoutRewriteBlock,
    SBlockRealize,
    SeqStmt,
    TuningRecord,
    build_tir,
    json_database,
    tensor,
)
from tvm_adaptive.database.metaschedule import trial_of
from tvm_adaptive.database.verdicts import candidate_key
from tvm_adaptive.models.prefetch import follow_hints, hinted, rewrite
from tvm_adaptive.models.prefetch.reading import integer, substitute
from tvm_adaptive.models.prefetch.rewrite import HINT, LINES_AT_ONCE
from tvm_adaptive.search_strategy.transfer import transfer_record_of


def forms_of(order: Sequence[tuple[str, int]], mod: IRModule | None = None) -> list[TuningRecord]:
    mod = product() if mod is None else mod
    return hinted(record_of_schedule(tiled(mod, order), mod), (1,))


def packed(record: TuningRecord) -> IRModule:
    scheduled = record.as_measure_candidate().sch.mod
    return RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)(scheduled)


def prefetches_of(statement: Any, loops: tuple[Any, ...] = ()) -> Iterator[tuple[Any, Any]]:
    """Yield (loops, prefetched element) of each prefetch."""
    if isinstance(statement, For):
        yield from prefetches_of(statement.body, (*loops, statement))
    elif isinstance(statement, SeqStmt):
        for each in statement.seq:
            yield from prefetches_of(each, loops)
    elif isinstance(statement, SBlockRealize):
        yield from prefetches_of(statement.block.body, loops)
    elif isinstance(statement, Evaluate) and "prefetch" in str(statement):
        yield loops, statement.value.args[0].args[0].indices[-1]


def prefetched_lines(mod: IRModule) -> dict[int, list[int]]:
    """Return the lines that are prefetched in each round of the outermost loop."""
    ((loops, element),) = prefetches_of(mod["main"].body)
    asked: dict[int, list[int]] = {}
    ranges = [range(int(loop.extent)) for loop in loops]
    for values in itertools.product(*ranges):
        bound = tuple(
            (loop.loop_var, integer(loop.loop_var, value))
            for loop, value in zip(loops, values, strict=True)
        )
        (at,) = substitute([element], bound)
        assert int(at) % LINE == 0
        asked.setdefault(values[0], []).append(int(at) // LINE)
    return asked


@pytest.mark.parametrize("order", [ROWS_INSIDE, GROUPS, TWO_SUMS], ids=["rows", "groups", "sums"])
@pytest.mark.parametrize("form", [0, 1], ids=["bursts", "at once"])
def test_each_round_prefetches_once_all_that_the_next_one_reads(order: Any, form: int) -> None:
    asked = prefetched_lines(follow_hints(packed(forms_of(order)[form])))
    n_rounds = order[0][1]
    n_lines = N_SUMMED * N_COLUMNS // LINE // n_rounds
    assert sorted(asked) == list(range(n_rounds))
    for number, lines in asked.items():
        assert sorted(lines) == list(range((number + 1) * n_lines, (number + 2) * n_lines))


@pytest.mark.parametrize("order", [ROWS_INSIDE, GROUPS, TWO_SUMS], ids=["rows", "groups", "sums"])
def test_results_are_the_same_to_the_last_bit(order: Any, rng: np.random.Generator) -> None:
    mod = product()
    plain = record_of_schedule(tiled(mod, order), mod)
    forms = forms_of(order)
    assert len(forms) == len(LINES_AT_ONCE)
    rows = rng.standard_normal((N_ROWS, N_SUMMED)).astype("float32")
    packed_shape = [int(extent) for extent in plain.args_info[1].shape]
    weights = rng.standard_normal(packed_shape).astype("float32")
    found = []
    ways = [packed(plain), *(follow_hints(packed(form)) for form in forms)]
    ways.append(packed(forms[0]))  # by a compiler that ignores hints
    for mod in ways:
        result = tensor(np.zeros((N_ROWS, N_COLUMNS), "float32"))
        build_tir(mod, target=LLVM)["main"](tensor(rows), tensor(weights), result)
        found.append(result.numpy())
    width = weights.shape[2]
    unpacked = weights.transpose(1, 0, 2).reshape(N_SUMMED, weights.shape[0] * width)
    np.testing.assert_allclose(found[0], rows @ unpacked, rtol=1e-4, atol=1e-4)
    assert all(np.array_equal(each, found[0]) for each in found[1:])
    text = build_tir(follow_hints(packed(forms[0])), target=LLVM).inspect_source("asm")
    assert "prefetch" in text or "prfm" in text


@pytest.mark.parametrize(
    ("order", "is_packed", "n_columns"),
    [(COLUMNS_INSIDE, True, N_COLUMNS), (ROWS_INSIDE, False, N_COLUMNS), (ROWS_INSIDE, True, 64)],
    ids=["all weights for each tile of rows", "not side by side", "small"],
)
def test_there_are_no_forms_where_prefetches_cannot_help(
    order: Any, is_packed: bool, n_columns: int
) -> None:
    mod = product(n_columns)
    record = record_of_schedule(tiled(mod, order, is_packed=is_packed), mod)
    assert hinted(record, (1,)) == []


def test_without_weights_there_is_nothing_to_prefetch() -> None:
    mod = product()
    assert hinted(record_of_schedule(tiled(mod, ROWS_INSIDE), mod), ()) == []


def test_a_form_is_the_same_candidate(tmp_path: Any) -> None:
    mod = product()
    plain = record_of_schedule(tiled(mod, ROWS_INSIDE), mod)
    keys = {candidate_key(trial_of(record)) for record in (plain, *forms_of(ROWS_INSIDE, mod))}
    assert len(keys) == 1
    records = (plain, *forms_of(ROWS_INSIDE, mod))
    transfer_records = [
        transfer_record_of(json.loads(trial_of(each).record), 1.0) for each in records
    ]
    assert transfer_records[0] is not None
    assert transfer_records == transfer_records[:1] * len(transfer_records)


def test_databases_keep_the_hint(tmp_path: Any) -> None:
    database, mod = json_database(tmp_path), product()
    form = forms_of(ROWS_INSIDE, mod)[0]
    workload = database.commit_workload(mod)
    database.commit_tuning_record(TuningRecord(form.trace, workload, [1e-3], LLVM, form.args_info))
    (kept,) = json_database(tmp_path).get_all_tuning_records()
    assert prefetched_lines(follow_hints(packed(kept))) == prefetched_lines(
        follow_hints(packed(form))
    )


def test_the_hint_keeps_its_name() -> None:
    assert HINT == "tvm_adaptive.prefetch", "databases and stores hold it"


def test_what_has_no_hint_stays_as_it_is() -> None:
    mod = product()
    assert follow_hints(mod) is mod
    scheduled = tiled(mod, ROWS_INSIDE).mod
    assert follow_hints(scheduled) is scheduled
    # With the change of layout inside, the weight is not what the block reads.
    whole = forms_of(ROWS_INSIDE)[0].as_measure_candidate().sch.mod
    assert follow_hints(whole) is whole


@pytest.mark.parametrize("hint", ["9:16", "no numbers", "1:0"])
def test_a_hint_that_makes_no_sense_is_ignored(hint: str, caplog: pytest.LogCaptureFixture) -> None:
    schedule = tiled(product(), ROWS_INSIDE)
    schedule.annotate(schedule.get_sblock("C_update"), HINT, hint)
    mod = RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)(schedule.mod)
    with caplog.at_level(logging.WARNING, logger=rewrite.__name__):
        assert follow_hints(mod) is mod
    assert "not followed" in caplog.text
