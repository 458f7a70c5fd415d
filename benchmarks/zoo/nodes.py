"""Run ONNX's own tests of operators through the import; write a table of operators.

``python -m benchmarks.zoo.nodes results.jsonl [NAME ...]`` continues the file: a test that is
in it is not run again. ``--table`` prints the page of the documentation from it.

Inputs behind the first become constants where an operator needs them to be known: the
shape of a Reshape, the pads of a Pad.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import signal
import tempfile
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.tables import markdown
from tvm_adaptive.errors import InvalidOptionError, summary_line
from tvm_adaptive.models import compile_network, prepare, run_network
from tvm_adaptive.models.frontend.onnx_file import read_onnx
from tvm_adaptive.models.frontend.shapes import network_of_imported
from tvm_adaptive.tuning.target import resolve_target

PASSES, FAILS, REFUSED = "passes", "fails", "not supported"
_TEST_SEC = 60


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("names", nargs="*", help="beginnings of the names of tests")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args(arguments)
    if options.table:
        print(table(_read(options.results)))
        return
    done = {each["name"] for each in _read(options.results)}
    context = multiprocessing.get_context("fork")
    with open(options.results, "a", encoding="utf-8") as file:
        for case in cases():
            if case.name in done or not _is_chosen(case.name, options.names):
                continue
            # One process for each: some operators end it.
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_send, args=(sender, case))
            process.start()
            sender.close()
            try:
                state, reason = receiver.recv()
            except EOFError:
                state, reason = FAILS, "the process ended"
            process.join()
            operators = sorted({node.op_type for node in case.model.graph.node})
            event = {"name": case.name, "operators": operators, "state": state, "why": reason}
            file.write(json.dumps(event) + "\n")
            file.flush()


def cases() -> list[Any]:
    """Return ONNX's tests of operators, without those of their definitions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.backend.test.case.node import collect_testcases

        found = collect_testcases(None)
    return [case for case in found if "expanded" not in case.name]


def _is_chosen(name: str, names: Sequence[str]) -> bool:
    return not names or any(name.startswith(f"test_{each}") for each in names)


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _send(sender: Any, case: Any) -> None:
    signal.alarm(_TEST_SEC)
    sender.send(check(case))


def check(case: Any) -> tuple[str, str]:
    """Run a test; return its state and why it is not passed."""
    case.data_sets = [tuple([_array(each) for each in part] for part in case.data_sets[0])]
    state, reason = _check(case.model, case.data_sets, case)
    if state == PASSES:
        return state, reason
    constant = _with_constants(case)
    if constant is None:
        return state, reason
    with_constants = _check(*constant, case)
    return with_constants if with_constants[0] == PASSES else (state, reason)


def _array(value: Any) -> Any:
    from onnx import TensorProto, numpy_helper

    if isinstance(value, TensorProto):
        return numpy_helper.to_array(value)
    return np.asarray(value) if isinstance(value, np.generic) else value


def _with_constants(case: Any) -> tuple[Any, list[Any]] | None:
    """Return a test whose inputs behind the first are constants."""
    from onnx import ModelProto, numpy_helper

    inputs, _ = case.data_sets[0]
    named = [each.name for each in case.model.graph.input]
    if len(inputs) < 2 or not all(isinstance(each, np.ndarray) for each in inputs):
        return None
    model = ModelProto()
    model.CopyFrom(case.model)
    for name, value in list(zip(named, inputs, strict=True))[1:]:
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    del model.graph.input[1:]
    return model, [(each[:1], outputs) for each, outputs in case.data_sets]


def _check(model: Any, data_sets: Sequence[Any], case: Any) -> tuple[str, str]:
    import onnx

    inputs, expected = data_sets[0]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net.onnx"
        onnx.save(model, str(path))
        try:
            names = [each.name for each in model.graph.input]
            shapes = {
                name: np.shape(value)
                for name, value in zip(names, inputs, strict=True)
                if isinstance(value, np.ndarray) and value.size
            }
            mod = read_onnx(path, shapes)
            network = network_of_imported("net", mod, shapes)
        except InvalidOptionError as error:
            return REFUSED, str(error).replace(str(path), "it")
        try:
            target = resolve_target("cpu")
            compiled = compile_network(prepare(network, target), None, target)
            outputs = run_network(compiled, inputs)
        except Exception as error:
            return FAILS, f"{type(error).__name__}: {summary_line(error)}"
    return _compare(outputs, expected, case)


def _compare(outputs: Sequence[Any], expected: Sequence[Any], case: Any) -> tuple[str, str]:
    if len(outputs) != len(expected):
        return FAILS, f"{len(outputs)} outputs instead of {len(expected)}"
    for found, wanted in zip(outputs, expected, strict=True):
        if found.shape != np.shape(wanted) or found.dtype != wanted.dtype:
            return FAILS, f"{found.dtype}{found.shape} instead of {wanted.dtype}{wanted.shape}"
        rtol, atol = max(case.rtol, 1e-4), max(case.atol or 0.0, 1e-5)
        if not np.allclose(
            found.astype("float64"), wanted.astype("float64"), rtol, atol, equal_nan=True
        ):
            return FAILS, "other values"
    return PASSES, ""


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return the page: operators of which a test does not pass, and why, and the others."""
    states: dict[str, Counter[str]] = {}
    reasons: dict[str, Counter[str]] = {}
    for each in results:
        operator = _operator(each)
        states.setdefault(operator, Counter())[each["state"]] += 1
        if each["why"]:
            reasons.setdefault(operator, Counter())[_short(each["why"])] += 1
    lines = []
    whole = [operator for operator in sorted(states) if set(states[operator]) == {PASSES}]
    for operator in sorted(set(states) - set(whole)):
        found = states[operator]
        why = "; ".join(text for text, _ in reasons.get(operator, Counter()).most_common(2))
        lines.append([operator, *(str(found[state]) for state in (PASSES, FAILS, REFUSED)), why])
    head = ["operator", "passes", "fails", "not supported", "why"]
    return f"{markdown(head, lines)}\n\nAll tests pass of {', '.join(whole)}."


def _operator(result: dict[str, Any]) -> str:
    """Return the operator that a test is named after."""
    plain = result["name"].removeprefix("test_").replace("_", "").lower()
    return max(result["operators"], key=lambda each: (plain.startswith(each.lower()), len(each)))


def _short(text: str) -> str:
    """Return the part of a message that says why."""
    text = text.replace("|", "/").replace("\n", " ")
    if "are open" in text:
        return "an extent is zero"
    if found := re.search(r"opset \d+: (.*)\)\. Replace", text):
        text = found[1]
    elif found := re.search(r"cannot import it: (\S+) \(.*opset \d+\)\. Replace", text):
        return f"no converter for {found[1]}"
    return text[:90]


if __name__ == "__main__":
    main()
