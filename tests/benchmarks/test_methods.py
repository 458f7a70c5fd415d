from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest

import benchmarks
from benchmarks.configs import config_of
from benchmarks.methods import LADDER, METHOD_SETS, METHODS, STOCK, Method, choose_methods
from benchmarks.torch_models import TORCH_MODELS
from benchmarks.workloads import (
    SIZES,
    WORKLOAD_SETS,
    WORKLOADS,
    choose_workloads,
)
from tvm_adaptive._tvm import te_workload_names
from tvm_adaptive.models import BUILTIN
from tvm_adaptive.tuning.config import DEFAULT, PAPER
from tvm_adaptive.tuning.parts import check_parts
from tvm_adaptive.tuning.registry import check_names


@pytest.mark.parametrize("method", [m for m in METHODS.values() if m.tuner != STOCK])
def test_every_method_is_a_configuration(method: Method) -> None:
    check_names(config_of(method))
    check_parts(config_of(method))


def test_methods_say_what_they_are() -> None:
    assert config_of(METHODS["default"]) == DEFAULT
    assert config_of(METHODS["paper"]) == PAPER
    assert config_of(METHODS["epsilon-0.2"]).search.epsilon == 0.2
    assert config_of(METHODS["ladder-0"]).search.n_trials_per_round == 64


def test_each_rung_of_the_ladder_changes_one_option_more() -> None:
    rungs = [dict(METHODS[name].changes) for name, _, _ in LADDER]
    for before, after in itertools.pairwise(rungs):
        assert len(before.items() ^ after.items()) == 2
    last = config_of(METHODS[LADDER[-1][0]])
    # All but how many candidates a batch has, and what it is chosen for.
    search = dataclasses.replace(
        last.search,
        **{
            name: getattr(DEFAULT.search, name)
            for name in (
                "n_trials_per_round",
                "diversity",
                "population_size",
                "genetic_num_iters",
            )
        },
    )
    assert last.replace(search=search) == DEFAULT


def test_stock_can_choose_only_how_a_network_is_prepared() -> None:
    for method in METHODS.values():
        if method.tuner == STOCK:
            assert set(method.changes) <= set(config_of(method).preparation)
            # Every form would get trials, though one of each convolution is deployed.
            assert not config_of(method).preparation["forms"]


def test_the_page_names_what_stock_is_prepared_without() -> None:
    ours = config_of(METHODS["default"]).preparation
    page = (Path(benchmarks.__file__).parent / "README.md").read_text()
    section = page.split("### What makes the comparison fair\n")[1].split("\n### ")[0]
    named = {key for key in ours if f"`{key}`" in section}
    assert named
    for method in METHODS.values():
        if method.tuner == STOCK:
            theirs = config_of(method).preparation
            assert {key for key in ours if ours[key] != theirs[key]} == named


def test_sets_name_methods_and_workloads_that_are_there() -> None:
    assert {name for names in METHOD_SETS.values() for name in names} <= set(METHODS)
    assert {name for names in WORKLOAD_SETS.values() for name in names} <= set(WORKLOADS)
    for size in SIZES.values():
        assert choose_methods(size.methods)
        assert choose_workloads(size.workloads)


def test_all_that_can_be_tuned_by_name_is_a_workload() -> None:
    assert {"te:" + name for name in te_workload_names()} >= set(WORKLOAD_SETS["operators"])
    assert set(WORKLOAD_SETS["networks"]) == set(BUILTIN) == set(TORCH_MODELS)


def test_words_may_repeat() -> None:
    names = [method.name for method in choose_methods(["main", "default", "ladder"])]
    assert names[:2] == ["stock", "default"]
    assert len(names) == len(set(names))


def test_an_unknown_word_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no method 'best'; methods are stock, .*ladder"):
        choose_methods(["best"])
    with pytest.raises(ValueError, match=r"no workload 'C2D'; workloads are te:C1D, .*networks"):
        choose_workloads(["C2D"])
