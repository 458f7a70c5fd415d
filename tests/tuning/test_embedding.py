from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

import tvm_adaptive
from tests.faults.test_machine import REASON, failing
from tests.tuning.runs import QUICK
from tests.tuning.test_deploy import FACTORY
from tvm_adaptive._tvm import IRModule, memory_database
from tvm_adaptive.database.store import RecordStore
from tvm_adaptive.errors import InvalidOptionError, MachineError, StoreError, WorkerError
from tvm_adaptive.measure_callback.journal import read_journal
from tvm_adaptive.models import Network
from tvm_adaptive.tuning import deploy, embedding, torch_backend
from tvm_adaptive.tuning.checks import network as network_check
from tvm_adaptive.tuning.config import FinishConfig
from tvm_adaptive.workers.environment import Environment
from tvm_adaptive.workers.scratch import remove_abandoned

pytestmark = pytest.mark.usefixtures("brief_timings")


@pytest.fixture(scope="module")
def compiled(brief_timings, tmp_path_factory):
    """A network that was tuned, and the same compiled from the records of that."""
    folder = tmp_path_factory.mktemp("embedded")
    (folder / "embedded.py").write_text(FACTORY)
    config = QUICK.replace(store=str(folder / "records.db"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        both = [
            tvm_adaptive.compile(
                "embedded:make", trials=8, seed=1, config=config, work_dir=folder / name
            )
            for name in ("first", "second")
        ]
    yield folder, both
    sys.modules.pop("embedded", None)


def aligned(shape):
    """Return an array that begins at a multiple of 64 bytes, which numpy's mostly do not."""
    n_bytes = int(np.prod(shape)) * 4
    raw = np.zeros(n_bytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    array = raw[start : start + n_bytes].view(np.float32).reshape(shape)
    array[...] = np.random.default_rng(0).standard_normal(shape)
    return array


def test_the_second_call_compiles_from_records(compiled):
    folder, (first, second) = compiled
    assert (folder / "first" / "run" / "journal.jsonl").is_file()
    assert not (folder / "second" / "run").exists()
    events = [each["event"] for each in read_journal(folder / "second/applied/apply.jsonl")]
    assert "coverage" in events
    value = aligned((1, 16, 32))
    np.testing.assert_allclose(first(value), second(value), rtol=1e-3, atol=1e-4)


def test_arrays_are_as_good_as_names_and_layouts(compiled):
    _, (_, model) = compiled
    value = aligned((1, 16, 32))
    expected = model(value)
    assert isinstance(expected, np.ndarray)
    wide = np.zeros((1, 16, 64), np.float32)
    wide[:, :, ::2] = value
    frozen = value.copy()
    frozen.flags.writeable = False
    shifted = np.zeros(value.size + 1, np.float32)[1:].reshape(value.shape)
    shifted[...] = value
    for each in (wide[:, :, ::2], frozen, shifted):
        np.testing.assert_array_equal(model(each), expected)
    np.testing.assert_array_equal(model(embedded=value), expected)
    kept = expected.copy()
    model(value + 1)
    np.testing.assert_array_equal(expected, kept)


def test_other_shapes_types_and_names_are_refused(compiled):
    _, (_, model) = compiled
    value = np.zeros((1, 16, 32), np.float32)
    for wrong in (value[:, :8], value.astype(np.float64)):
        with pytest.raises(InvalidOptionError, match="Input embedded must be float32"):
            model(wrong)
    with pytest.raises(InvalidOptionError, match="takes 1 inputs"):
        model(value, value)
    with pytest.raises(InvalidOptionError, match="embedded are missing"):
        model(other=value)


def test_threads_may_call_at_once(compiled):
    _, (_, model) = compiled
    values = [aligned((1, 16, 32)) * scale for scale in (1, 2, 3)]
    expected = [model(each) for each in values]
    found = {}

    def call(place):
        found[place] = [model(values[place]) for _ in range(20)]

    threads = [threading.Thread(target=call, args=(place,)) for place in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for place, results in found.items():
        assert all(np.array_equal(each, expected[place]) for each in results)
    assert len(found) == len(values)


def test_without_records_and_budget_there_is_nothing_to_compile(compiled, tmp_path, monkeypatch):
    folder, _ = compiled
    monkeypatch.chdir(folder)
    config = QUICK.replace(store=str(tmp_path / "empty.db"))
    with pytest.raises(InvalidOptionError, match="Nothing was recorded"):
        tvm_adaptive.compile("embedded:make", config=config)


def test_files_of_other_programs_are_not_replaced(compiled, tmp_path):
    folder, _ = compiled
    config = QUICK.replace(store=str(folder / "records.db"))
    mine = tmp_path / "applied" / "embedded-make.so"
    mine.parent.mkdir()
    mine.write_text("mine")
    with pytest.raises(InvalidOptionError, match=r"embedded-make.so would be replaced"):
        tvm_adaptive.compile("embedded:make", config=config, work_dir=tmp_path)
    assert mine.read_text() == "mine"


def test_a_library_that_cannot_be_run_is_not_returned(compiled, tmp_path, monkeypatch):
    """It may end the process that loads it, as it has ended a worker."""
    folder, _ = compiled
    monkeypatch.chdir(folder)
    monkeypatch.setattr(network_check, "try_exported", crash)
    config = QUICK.replace(store=str(folder / "records.db"))
    with pytest.raises(WorkerError, match="could not be run"):
        tvm_adaptive.compile("embedded:make", config=config, work_dir=tmp_path)


def crash(*_arguments, **_options):
    os.abort()


def test_the_untuned_library_is_not_returned_for_a_tuned_one(compiled, tmp_path, monkeypatch):
    folder, _ = compiled
    monkeypatch.chdir(folder)
    monkeypatch.setattr(network_check, "export_module", refuse)
    config = QUICK.replace(store=str(tmp_path / "empty.db"))
    with pytest.raises(WorkerError, match=r"could not be compiled: .*no room"):
        tvm_adaptive.compile("embedded:make", trials=4, config=config)


def refuse(*_arguments, **_options):
    raise RuntimeError("the linker found no room")


def test_a_machine_that_fails_is_an_error_and_no_interrupt(compiled, tmp_path, monkeypatch):
    folder, _ = compiled
    monkeypatch.chdir(folder)
    config = QUICK.replace(store=str(tmp_path / "empty.db"))
    with failing(lambda _number: True), pytest.raises(MachineError, match=REASON):
        tvm_adaptive.compile("embedded:make", trials=8, config=config)


@pytest.mark.parametrize(
    ("fails", "keeps"), [("check", True), ("check", False), ("compilation", False)]
)
def test_errors_name_a_journal_that_is_there(compiled, tmp_path, monkeypatch, fails, keeps):
    folder, _ = compiled
    monkeypatch.chdir(folder)
    if fails == "check":
        monkeypatch.setattr(deploy, "checked_database", lambda *_: memory_database())
        error, text = InvalidOptionError, "passed its check"
    else:
        monkeypatch.setattr(network_check, "export_module", refuse)
        error, text = WorkerError, "cannot be deployed: .*no room"
    config = QUICK.replace(store=str(folder / "records.db"))
    with pytest.raises(error, match=text) as raised:
        tvm_adaptive.compile("embedded:make", config=config, work_dir=tmp_path if keeps else None)
    journal = tmp_path / "applied" / "apply.jsonl"
    assert journal.is_file() == (str(journal) in str(raised.value)) == keeps
    assert ("the journal that work_dir= keeps" in str(raised.value)) == (not keeps)
    assert ("apply.jsonl" in str(raised.value)) == keeps


def test_a_model_counts_as_tuned_only_in_its_store_and_where_it_was_measured(monkeypatch, tmp_path):
    network, target = Network("net", IRModule({}), {}, {}, {}), embedding.resolve_target("cpu")
    config = tvm_adaptive.TuneConfig()
    monkeypatch.setattr(embedding, "content_of", lambda _: "relax:1")
    here = embedding._key_of(network, target, config)
    assert here == embedding._key_of(network, target, config)
    one, other = (config.replace(store=str(tmp_path / name)) for name in ("one.db", "other.db"))
    with RecordStore(one.store) as store:
        store.note_tuned(here)
    assert [embedding._was_tuned(here, each) for each in (one, other)] == [True, False]
    loose = config.replace(finish=FinishConfig(rtol=0.1))
    assert embedding._key_of(network, target, loose) == ""
    elsewhere = Environment("another processor, 2 cores", "0.27.0", "0.1.14")
    monkeypatch.setattr(embedding, "environment_of", lambda *_: elsewhere)
    assert embedding._key_of(network, target, config) != here


def test_one_process_forks_all_workers_of_a_call(monkeypatch):
    given, server = [], object()

    def run(*_arguments, server, **_options):
        given.append(server)
        raise WorkerError("nothing is tuned here")

    monkeypatch.setattr(embedding, "worker_server", lambda: contextlib.nullcontext(server))
    monkeypatch.setattr(embedding, "ModelReader", given.append)
    network = Network("net", IRModule({}), {}, {}, {})
    monkeypatch.setattr(embedding, "load", lambda *_, **__: network)
    monkeypatch.setattr(embedding, "content_of", lambda _: "")
    monkeypatch.setattr(embedding, "apply_network", lambda *_, server, **__: given.append(server))
    monkeypatch.setattr(embedding, "run_loaded", run)
    with pytest.raises(WorkerError, match="nothing is tuned"):
        tvm_adaptive.compile("net.onnx", trials=1, config=QUICK)
    assert given == [server] * 3


@pytest.mark.parametrize(
    ("options", "error"), [({"trials": 1}, "nothing is tuned"), ({}, "the disk fails")]
)
@pytest.mark.parametrize("fails", ["was_tuned", "apply_network"])
def test_a_store_that_cannot_be_read_costs_a_search_its_records(
    monkeypatch, tmp_path, options, error, fails
):
    def fail(*_arguments, **_options):
        raise StoreError("the disk fails")

    def run(*_arguments, **_options):
        raise WorkerError("nothing is tuned")

    network = Network("net", IRModule({}), {}, {}, {})
    monkeypatch.setattr(embedding, "load", lambda *_, **__: network)
    monkeypatch.setattr(embedding, "content_of", lambda _: "relax:1")
    monkeypatch.setattr(embedding, "apply_network", fail)
    monkeypatch.setattr(embedding, "run_loaded", run)
    if fails == "was_tuned":
        monkeypatch.setattr(RecordStore, "was_tuned", fail)
    config = QUICK.replace(store=str(tmp_path / "records.db"))
    with pytest.raises((StoreError, WorkerError), match=error):
        tvm_adaptive.compile("net.onnx", config=config, **options)


def test_the_folder_of_a_model_is_its_process_own_and_a_killed_one_leaves_none(tmp_path):
    program = """
        import os, signal, sys
        from tvm_adaptive.tuning.embedding import _folder
        path, keep = _folder(None)
        child = os.fork()
        if child == 0:
            sys.exit()
        os.waitpid(child, 0)
        print(path, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    folder = Path(done.stdout.strip())
    assert folder.parent == tmp_path
    assert folder.is_dir()
    remove_abandoned(tmp_path)
    assert not folder.exists()


def test_arguments_that_say_nothing_are_refused():
    with pytest.raises(InvalidOptionError, match="seed must be at least 0"):
        tvm_adaptive.compile("net.onnx", seed=-1)
    network = Network("net", IRModule({}), {}, {}, {})
    for options in ({"input_shapes": {"x": (1,)}}, {"params": {"w": 0}}):
        with pytest.raises(InvalidOptionError, match="omit"):
            tvm_adaptive.compile(network, **options)
    with pytest.raises(InvalidOptionError, match="params are the weights of an IRModule"):
        tvm_adaptive.compile("net.onnx", params={"w": 0})


def test_what_is_no_model_is_refused():
    with pytest.raises(InvalidOptionError, match="model must be a file"):
        tvm_adaptive.compile(3)


def test_pytorch_finds_the_backend_by_the_entry_point():
    tomllib = pytest.importorskip("tomllib")  # of Python 3.11
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    entry = tomllib.loads(text)["project"]["entry-points"]["torch_dynamo_backends"]
    module, _, name = entry["tvm_adaptive"].partition(":")
    assert callable(getattr(__import__(module, fromlist=[name]), name))


@pytest.fixture
def torch():
    found = pytest.importorskip("torch")
    found._dynamo.reset()
    found.manual_seed(0)
    return found


@pytest.fixture
def backend():
    from tvm_adaptive.tuning.torch_backend import tvm_adaptive as found

    return found


def perceptron(torch):
    layers = torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU()
    return torch.nn.Sequential(*layers, torch.nn.Linear(16, 4)).eval()


@pytest.mark.slow
def test_torch_compile_runs_the_graph_until_a_weight_changes(torch, backend, tmp_path):
    model, value = perceptron(torch), torch.randn(4, 8)
    options = {"trials": 8, "seed": 0, "config": QUICK.replace(store=str(tmp_path / "records.db"))}
    function = torch.compile(model, backend=backend, options=options)
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.filterwarnings("error", "tvm_adaptive leaves")
        torch.testing.assert_close(function(value), model(value), rtol=1e-3, atol=1e-4)
    with torch.inference_mode():
        model[3].bias.data.add_(1)
    model[3].bias = torch.nn.Parameter(model[3].bias + 1)
    with torch.inference_mode():
        torch.testing.assert_close(function(value), model(value), rtol=1e-3, atol=1e-4)


def test_weights_that_change_during_the_search_are_seen(torch, backend, monkeypatch):
    model, value = perceptron(torch), torch.randn(4, 8)

    def tune(_network, **_options):
        model[3].bias.add_(1)  # as another thread does that loads a state
        return lambda x: x

    monkeypatch.setattr(torch_backend, "compile_model", tune)
    function = torch.compile(model, backend=backend)
    with torch.no_grad(), pytest.warns(RuntimeWarning, match="a weight has changed"):
        torch.testing.assert_close(function(value), model(value))


def test_threads_that_call_at_once_compile_once(monkeypatch):
    # Not by PyTorch, which traces in one thread at a time.
    calls, results = [], []

    def compile_slowly(_graph, _arguments):
        calls.append(1)
        time.sleep(0.3)
        return lambda x: x + 1, Mock(are_same=lambda _: True)

    graph = object.__new__(torch_backend._Graph)
    graph._compiled, graph._is_eager, graph._lock = None, False, threading.Lock()
    graph._places, graph._outputs, graph._views = [0], [True], {}
    monkeypatch.setattr(torch_backend._Graph, "_compile", compile_slowly)
    threads = [threading.Thread(target=lambda: results.append(graph(1))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert results == 4 * [(2,)]


@pytest.mark.parametrize(
    "case", ["gradients", "dynamic", pytest.param("random", marks=pytest.mark.slow)]
)
def test_what_cannot_be_compiled_runs_in_pytorch(torch, backend, case, tmp_path):
    model, value = perceptron(torch), torch.randn(4, 8)
    if case == "random":
        model = torch.nn.Sequential(model, torch.nn.Dropout(0.5).train())
    config = QUICK.replace(store=str(tmp_path / "records.db"))
    options = {"trials": 1, "config": config}
    function = torch.compile(
        model, backend=backend, options=options, dynamic=True if case == "dynamic" else None
    )
    reason = {"gradients": "gradients are wanted", "dynamic": "dynamic", "random": ""}[case]
    with torch.set_grad_enabled(case == "gradients"):
        with pytest.warns(RuntimeWarning, match=f"tvm_adaptive leaves .*{reason}"):
            found = function(value)
        torch.manual_seed(1)
        found = function(value)
        torch.manual_seed(1)
        torch.testing.assert_close(found, model(value))
    assert found.requires_grad == (case == "gradients")


def test_views_of_memory_run_in_pytorch(torch, backend, tmp_path):
    weight, value = torch.randn(8, 3), torch.randn(8, 4).t()

    def rows(x):
        return torch.as_strided(x, (4, 8), (8, 1)) @ weight

    options = {"trials": 1, "config": QUICK.replace(store=str(tmp_path / "records.db"))}
    function = torch.compile(rows, backend=backend, options=options)
    with torch.no_grad(), pytest.warns(RuntimeWarning, match="tvm_adaptive leaves .*as_strided"):
        torch.testing.assert_close(function(value), rows(value))


def compile_copies(graph, arguments):
    """Return what runs a graph in PyTorch, and returns tensors of their own."""

    def run(*inputs):
        return tuple(each.clone() for each in graph._graph(*inputs))

    held = [*graph._graph.parameters(), *graph._graph.buffers()]
    return run, torch_backend._Weights(arguments, [], held)


@pytest.mark.parametrize("case", ["output", "input", "same", "part", "alias"])
def test_what_follows_a_graph_sees_what_shares_memory(torch, backend, monkeypatch, case):
    """Compiled networks return tensors of their own."""

    def function(x):
        y = x if case == "input" else x * 2
        if case == "same":
            view = y.view(4, 8)
        elif case == "alias":
            view = y.contiguous()
        else:
            view = y[1:, 2:5].t() if case == "part" else y[0]
        z = x + 1
        torch._dynamo.graph_break()
        view.add_(1)
        return y, view, z

    monkeypatch.setattr(torch_backend._Graph, "_compile", compile_copies)
    torch._dynamo.reset()
    compiled, value = torch.compile(function, backend=backend), torch.randn(4, 8)
    for given in (torch.empty(5, 8)[1:].copy_(value), value.clone()):
        with torch.no_grad():
            expected, found = function(value.clone()), compiled(given)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
        torch.testing.assert_close(given, expected[0] if case == "input" else value)


@pytest.mark.parametrize("case", ["channels last", "columns", "type"])
def test_outputs_that_share_memory_without_a_whole_one_run_in_pytorch(
    torch, backend, monkeypatch, case
):
    def function(x):
        y = x * 2
        if case == "type":
            first, view = x, x.view(torch.int32)
        else:
            first = y[:, :4] if case == "columns" else y
            view = first[0]
        z = x + 1
        torch._dynamo.graph_break()
        view.zero_()
        return first, view, z

    monkeypatch.setattr(torch_backend._Graph, "_compile", compile_copies)
    value = torch.randn(2, 8, 4, 4)
    if case == "channels last":
        value = value.to(memory_format=torch.channels_last)
    compiled = torch.compile(function, backend=backend)
    with torch.no_grad(), pytest.warns(RuntimeWarning, match="its outputs share memory"):
        found = compiled(value.clone())
    with torch.no_grad():
        expected = function(value.clone())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("axis", [0, 1])
def test_parts_without_common_elements_are_compiled(torch, axis):
    parts = torch.zeros(4, 8).chunk(2, axis)
    assert torch_backend._views_of([], parts) == {}


def test_views_of_inputs_that_share_memory_run_in_pytorch(torch, backend, monkeypatch):
    """Of which of them an output is a view, another call would decide in another way."""

    def function(x, y):
        total, view = x + y, x[1:]
        torch._dynamo.graph_break()
        view.add_(1)
        return total, x

    def refuse(*_arguments):
        raise ValueError("it is not compiled here")

    monkeypatch.setattr(torch_backend._Graph, "_compile", refuse)
    torch._dynamo.reset()
    value = torch.randn(8, 4)
    compiled = torch.compile(function, backend=backend)
    with torch.no_grad(), pytest.warns(RuntimeWarning, match="inputs that share memory"):
        found = compiled(*value.clone().chunk(2))
    with torch.no_grad():
        expected = function(*value.clone().chunk(2))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_unknown_options_are_refused(torch, backend):
    with pytest.raises(Exception, match="no options seconds"):
        torch.compile(perceptron(torch), backend=backend, options={"seconds": 3})(torch.ones(1, 8))


@pytest.mark.slow
def test_distilbert_runs_compiled(torch, backend, tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layers": 2, "dim": 128, "hidden_dim": 512, "n_heads": 4, "vocab_size": 1000}
    model = transformers.DistilBertModel(transformers.DistilBertConfig(**sizes)).eval()
    check_compiled(torch, backend, tmp_path, model, torch.randint(0, 1000, (1, 32)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "mobilenetv3_small_100"])
def test_a_network_of_timm_runs_compiled(torch, backend, tmp_path, name):
    timm = pytest.importorskip("timm")
    check_compiled(
        torch, backend, tmp_path, timm.create_model(name).eval(), torch.randn(1, 3, 224, 224)
    )


def check_compiled(torch, backend, tmp_path, model, value):
    config = tvm_adaptive.TuneConfig().replace(store=str(tmp_path / "records.db"))
    options = {"budget_sec": 60.0, "config": config}
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.filterwarnings("error", "tvm_adaptive leaves")
        function = torch.compile(model, backend=backend, options=options)
        leaves = torch.utils._pytree.tree_leaves
        found, expected = leaves(function(value)), leaves(model(value))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
