import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.testing.te_workload import CONFIGS, create_te_workload

import tvm_adaptive
from tvm_adaptive.tuning import registry
from tvm_adaptive.tuning.target import resolve_target

OURS = {
    ms.CostModel: ("rfei", tvm_adaptive.RFEICostModel),
    ms.SearchStrategy: ("adaptive", tvm_adaptive.AdaptiveSearch),
    ms.Builder: ("persistent", tvm_adaptive.PersistentBuilder),
    ms.Runner: ("adaptive", tvm_adaptive.AdaptiveRunner),
    ms.TaskScheduler: ("dynatune", tvm_adaptive.AdaptiveScheduler),
}
NAMES = {"cost_model": "rfei", "strategy": "adaptive", "runner": "adaptive"}
# Stock's builder lets each worker import every tensor intrinsic within a candidate's time: on
# a slow machine more than its 30 s.
PATIENCE_SEC = 120.0


@pytest.fixture
def restored():
    yield
    tvm_adaptive.register()


@pytest.mark.parametrize("base", OURS, ids=lambda base: base.__name__)
def test_our_names_make_our_parts(base):
    name, kind = OURS[base]
    assert isinstance(base.create(name), kind)


def test_the_call_that_tune_tasks_makes_is_understood():
    model = ms.CostModel.create("rfei", num_tuning_cores=2, tree_method="auto")
    assert isinstance(model, tvm_adaptive.RFEICostModel)
    assert isinstance(ms.Runner.create("adaptive", max_workers=2), tvm_adaptive.AdaptiveRunner)


def test_parts_that_are_made_by_name_search_alike():
    def drawn(**options):
        return ms.CostModel.create("rfei", **options)._inst._rng.integers(2**31)

    assert drawn() == drawn()
    assert drawn() != drawn(seed=7)
    assert isinstance(ms.TaskScheduler.create("dynatune")._inst.seed, int)


def test_stock_names_still_make_stock_parts():
    assert isinstance(
        ms.SearchStrategy.create("evolutionary"), ms.search_strategy.EvolutionarySearch
    )
    assert isinstance(ms.CostModel.create("random"), ms.cost_model.RandomModel)
    assert isinstance(ms.TaskScheduler.create("gradient"), ms.task_scheduler.GradientBased)


@pytest.mark.parametrize(
    ("base", "text"),
    [
        (ms.CostModel, "Unknown CostModel: nonsense"),
        (ms.SearchStrategy, "Unknown SearchStrategy: nonsense"),
        (ms.TaskScheduler, "Unknown TaskScheduler name: nonsense"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_an_unknown_name_gives_tvms_own_error(base, text):
    with pytest.raises(ValueError, match=text):
        base.create("nonsense")


def test_unregister_is_complete_and_repeatable(restored):
    stock_pass = relax.transform.MetaScheduleTuneIRMod._tvm_adaptive_stock
    tvm_adaptive.unregister()
    tvm_adaptive.unregister()
    with pytest.raises(ValueError, match="Unknown CostModel: rfei"):
        ms.CostModel.create("rfei")
    assert relax.transform.MetaScheduleTuneIRMod is stock_pass
    tvm_adaptive.register()
    tvm_adaptive.register()
    assert isinstance(ms.CostModel.create("rfei"), tvm_adaptive.RFEICostModel)
    assert relax.transform.MetaScheduleTuneIRMod._tvm_adaptive_stock is stock_pass


def test_names_lists_ours_first():
    assert registry.names("cost_model") == ["rfei", "rfei-family", "xgb", "mlp", "random"]


def small_gmm():
    return tvm.IRModule({"main": create_te_workload("GMM", 0)})


def n_valid(database):
    times = [np.mean([float(t) for t in r.run_secs]) for r in database.get_all_tuning_records()]
    return sum(0 < t < 1e3 for t in times)


def test_all_names_together_in_stock_tune_tir(tmp_path):
    database = ms.tune_tir(
        small_gmm(),
        resolve_target("cpu"),
        str(tmp_path),
        8,
        num_trials_per_iter=4,
        builder="persistent",
        seed=1,
        **NAMES,
    )
    assert n_valid(database) == 8


# Stock's build workers import TVM anew for each batch.
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", sorted(NAMES))
def test_each_name_alone_beside_stock_parts(tmp_path, part):
    database = ms.tune_tir(
        small_gmm(),
        resolve_target("cpu"),
        str(tmp_path),
        8,
        num_trials_per_iter=4,
        builder=ms.builder.LocalBuilder(timeout_sec=PATIENCE_SEC),
        **{part: NAMES[part]},
    )
    assert n_valid(database) == 8


# TVM itself can't make its Winograd convolution any more.
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("workload", sorted(set(CONFIGS) - {"C2D_WIN_NHWC"}))
def test_every_testing_workload(tmp_path, workload):
    mod = create_te_workload(workload, 0)
    builder = ms.builder.LocalBuilder(timeout_sec=PATIENCE_SEC)
    database = ms.tune_tir(mod, resolve_target("cpu"), str(tmp_path), 64, builder=builder, **NAMES)
    assert n_valid(database) > 0


def relax_module():
    @tvm.script.ir_module
    class Module:
        @tvm.script.relax.function
        def main(
            x: tvm.script.relax.Tensor((16, 32), "float32"),
            w: tvm.script.relax.Tensor((32, 16), "float32"),
        ):
            with tvm.script.relax.dataflow():
                y = tvm.script.relax.matmul(x, w)
                z = tvm.script.relax.nn.relu(y)
                tvm.script.relax.output(z)
            return z

    return Module


def test_the_names_work_in_the_tuning_pass(tmp_path):
    target = resolve_target("cpu")
    with target, tvm.transform.PassContext(opt_level=3):
        mod = relax.get_pipeline("zero")(relax_module())
        tune = relax.transform.MetaScheduleTuneIRMod(
            params={},
            work_dir=str(tmp_path),
            max_trials_global=4,
            num_trials_per_iter=4,
            builder="persistent",
            **NAMES,
        )
        assert tvm_ffi.structural_equal(tune(mod), mod)
        applied = relax.transform.MetaScheduleApplyDatabase(str(tmp_path))(mod)
    scheduled = [
        function.attrs.get("tirx.is_scheduled", False)
        for function in applied.functions.values()
        if isinstance(function, tvm.tirx.PrimFunc)
    ]
    assert any(scheduled)


def test_the_names_work_in_stock_tune_relax(tmp_path):
    target = resolve_target("cpu")
    with target, tvm.transform.PassContext(opt_level=3):
        mod = relax.get_pipeline("zero")(relax_module())
    database = ms.relax_integration.tune_relax(
        mod, {}, target, str(tmp_path), 4, num_trials_per_iter=4, builder="persistent", **NAMES
    )
    assert n_valid(database) == 4
