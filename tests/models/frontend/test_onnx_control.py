"""Graphs without loops and branches compute what they did, by ONNX's own reference."""

from __future__ import annotations

import numpy as np
import pytest

from tvm_adaptive.models.frontend.onnx_control import (
    compared_numbers,
    decided,
    is_controlled,
    merged,
    taken,
    unrolled,
)

onnx = pytest.importorskip("onnx")
reference = pytest.importorskip("onnx.reference")
make, kinds = onnx.helper, onnx.TensorProto
node = make.make_node
X = np.array([0.5, -1.5, 2.0], "float32")


def info(name, kind=kinds.FLOAT, shape=None):
    return make.make_tensor_value_info(name, kind, shape)


def model_of(nodes, weights=None, *, inputs=(), outputs=("y",), opset=17):
    tensors = [onnx.numpy_helper.from_array(np.asarray(v), k) for k, v in (weights or {}).items()]
    inputs = [info("x", shape=[3]), *inputs]
    graph = make.make_graph(nodes, "net", inputs, [info(each) for each in outputs], tensors)
    return make.make_model(graph, opset_imports=[make.make_opsetid("", opset)])


def copy_of(model):
    return onnx.ModelProto.FromString(model.SerializeToString())


def computed(model, **feeds):
    return reference.ReferenceEvaluator(model).run(None, {"x": X, **feeds})


def operators(model):
    return [each.op_type for each in model.graph.node]


def loop(count="n", go="", *, stays="go", opset=17, extra=()):
    """Multiply ``x`` by two and a weight of the body at each step; what was is also put out."""
    body = make.make_graph(
        [
            node("Mul", ["state", "factor"], ["scaled"], name="scale"),
            node("Identity", ["state"], ["was"]),
            *extra,
        ],
        "body",
        [info("i", kinds.INT64, []), info("go", kinds.BOOL, []), info("state", shape=[3])],
        [info(stays, kinds.BOOL, []), info("scaled", shape=[3]), info("was", shape=[3])],
        [onnx.numpy_helper.from_array(np.float32(2), "factor")],
    )
    nodes = [node("Loop", [count, go, "x"], ["y", "all"], body=body)]
    return model_of(nodes, {"n": np.array(3)}, outputs=("y", "all"), opset=opset)


@pytest.mark.parametrize("opset", [11, 17])
def test_a_loop_of_a_known_count_is_written_out(opset):
    model = loop(opset=opset)
    found = unrolled(copy_of(model))
    assert not is_controlled(found)
    assert operators(found).count("Mul") == 3
    last, rows = computed(found)
    assert np.array_equal(last, 8 * X)
    assert np.array_equal(rows, [X, 2 * X, 4 * X])


def test_a_value_of_a_body_may_be_named_step():
    found = unrolled(loop(extra=(node("Identity", ["i"], ["step"]),))).graph
    results = [name for each in found.node for name in each.output]
    constants = [each.name for each in found.initializer]
    assert len({*results, *constants}) == len(results) + len(constants)


def test_a_loop_without_a_step_hands_on_what_it_is_given():
    model = loop("none")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(0), "none"))
    (written,) = model.graph.node
    del written.output[1:]  # what would have no rows
    del written.attribute[0].g.output[2:]
    del model.graph.output[1:]
    found = unrolled(model)
    assert operators(found) == ["Identity"]
    assert np.array_equal(computed(found)[0], X)


@pytest.mark.parametrize(
    ("count", "go", "stays", "extra"),
    [
        ("unknown", "", "go", ()),  # how often
        ("", "", "go", ()),  # for ever
        ("n", "unknown", "go", ()),
        ("n", "never", "go", ()),
        ("none", "", "go", ()),
        ("many", "", "go", ()),
        ("n", "", "ends", (node("Not", ["go"], ["ends"]),)),
        ("n", "", "ends", (node("Constant", [], ["ends"],
            value=onnx.numpy_helper.from_array(np.array(False))),)),
    ],
)  # fmt: skip
def test_other_loops_stay(count, go, stays, extra):
    model = loop(count, go, stays=stays, extra=extra)
    for name, value in (("never", False), ("none", 0), ("many", 20_000)):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(value), name))
    assert operators(unrolled(model)) == ["Loop"]


def test_a_body_may_set_its_condition_to_true_and_use_it_in_branches():
    true = node("Constant", [], ["on"], value=onnx.numpy_helper.from_array(np.array(True)))
    outer = branch("then", node("Add", ["scaled", "scaled"], ["b"]))
    inner = node("If", ["go"], ["unused"], then_branch=outer, else_branch=outer)
    found = unrolled(loop(stays="on", extra=(true, inner)))
    # The branches' condition is constant, too.
    assert not is_controlled(found)
    assert operators(found).count("Add") == 3
    assert np.array_equal(computed(found)[0], 8 * X)


def branch(name, *nodes, weights=None):
    tensors = [onnx.numpy_helper.from_array(np.asarray(v), k) for k, v in (weights or {}).items()]
    return make.make_graph(list(nodes), name, [], [info("b")], tensors)


def choice(condition, **more):
    """Double ``x`` or add ten to it; both branches use the name ``w`` for their weight."""
    nodes = [
        *more.pop("before", ()),
        node(
            "If", [condition], ["y"],
            then_branch=branch("twice", node("Mul", ["x", "w"], ["b"]),
                               weights={"w": np.float32(2)}),
            else_branch=branch("more", more.pop("other", node("Add", ["x", "w"], ["b"])),
                               weights={"w": np.float32(10)}),
        ),
    ]  # fmt: skip
    return model_of(nodes, **more)


@pytest.mark.parametrize(("value", "expected"), [(3, 2 * X), (5, X + 10)])
def test_a_branch_is_taken_whose_condition_is_computed_from_constants(value, expected):
    before = [node("Less", ["size", "limit"], ["is_small"])]
    weights = {"size": np.array(value), "limit": np.array(4)}
    found = taken(choice("is_small", before=before, weights=weights))
    assert not is_controlled(found)
    assert np.array_equal(computed(found)[0], expected)


def test_branches_on_inputs_and_on_weights_in_other_files_are_not_taken():
    before = [node("ReduceSum", ["x"], ["s"], keepdims=0), node("Less", ["s", "zero"], ["is"])]
    of_data = choice("is", before=before, weights={"zero": np.float32(0)})
    assert operators(taken(of_data)) == ["ReduceSum", "Less", "If"]
    far = choice("is", weights={"is": np.array(True)})
    far.graph.initializer[0].data_location = kinds.EXTERNAL
    assert operators(taken(far)) == ["If"]
    unknown = choice("is", before=[node("Bend", ["zero"], ["is"], domain="my.own")],
                     weights={"zero": np.float32(0)})  # fmt: skip
    assert operators(taken(unknown)) == ["Bend", "If"]


def test_branches_inside_of_branches_are_taken():
    inner = node(
        "If", ["yes"], ["b"],
        then_branch=branch("inner", node("Neg", ["x"], ["b"])),
        else_branch=branch("other", node("Exp", ["x"], ["b"])),
    )  # fmt: skip
    found = taken(choice("no", other=inner, weights={"yes": np.array(True), "no": np.array(False)}))
    assert not is_controlled(found)
    assert np.array_equal(computed(found)[0], -X)


@pytest.mark.parametrize("is_large", [True, False])
def test_branches_of_one_shape_are_merged(is_large):
    nodes = [node("ReduceSum", ["x"], ["s"], keepdims=0), node("Greater", ["s", "limit"], ["is"])]
    limit = {"limit": np.float32(0 if is_large else 2)}
    found = merged(choice("is", before=nodes, weights=limit))
    assert not is_controlled(found)
    assert np.array_equal(computed(found)[0], 2 * X if is_large else X + 10)


def test_branches_of_other_shapes_stay():
    go = info("go", kinds.BOOL, [])
    found = merged(choice("go", inputs=[go], other=node("ReduceSum", ["x"], ["b"], keepdims=0)))
    assert operators(found) == ["If"]


def test_a_number_decides_what_depends_on_it():
    rate = info("rate", kinds.INT64, [1])
    before = [
        node("Squeeze", ["rate"], ["one"]),
        node("Equal", ["wide", "one"], ["is_wide"]),
    ]
    model = choice("is_wide", before=before, inputs=[rate], weights={"wide": np.array(16)})
    assert compared_numbers(model) == {"rate": [16]}
    for value, expected in ((16, 2 * X), (8, X + 10)):
        found = taken(decided(model, {"rate": value}))
        assert not is_controlled(found)
        assert [each.name for each in found.graph.input] == ["x", "rate"]
        assert np.array_equal(computed(found, rate=np.array([99]))[0], expected)
    # A number of floats is data; it decides nothing.
    assert decided(model, {"x": 3}) == model


def test_a_graph_that_is_a_circle_compares_nothing():
    nodes = [node("Identity", ["a"], ["b"]), node("Identity", ["b"], ["a"]),
             node("Equal", ["a", "two"], ["is"])]  # fmt: skip
    model = model_of(nodes, {"two": np.array(2)}, outputs=("is",))
    assert compared_numbers(model) == {}
    # A mask of floats decides nothing either.
    masked = model_of([node("Equal", ["x", "low"], ["is"])], {"low": np.float32(-np.inf)},
                      outputs=("is",))  # fmt: skip
    assert compared_numbers(masked) == {}
    assert taken(choice("is", before=nodes, weights={"two": np.array(2)})).graph.node


def test_a_number_that_decides_nothing_stays_an_input():
    """As the token of a decoder, beside the switch of its cache."""
    before = [
        node("Equal", ["rate", "fast"], ["is_fast"]),
        node("Gather", ["table", "ids"], ["taken"]),
    ]
    inputs = [info("rate", kinds.INT64, [1]), info("ids", kinds.INT64, [1, 1])]
    weights = {"fast": np.array([16]), "table": X}
    model = choice("is_fast", before=before, weights=weights, inputs=inputs)
    model.graph.output.append(info("taken"))
    found = taken(decided(model, {"rate": 16, "ids": 2}))
    assert not is_controlled(found)
    for ids in (0, 1):
        y, taken_row = computed(found, rate=np.array([9]), ids=np.array([[ids]]))
        assert np.array_equal(y, 2 * X)
        assert np.array_equal(taken_row, [[X[ids]]])


def test_loops_in_loops_and_branches_on_the_step_are_written_out():
    inner = make.make_graph(
        [node("Add", ["inner_state", "one"], ["more"])],
        "inner",
        [info("j", kinds.INT64, []), info("c", kinds.BOOL, []), info("inner_state", shape=[3])],
        [info("c", kinds.BOOL, []), info("more", shape=[3])],
        [onnx.numpy_helper.from_array(np.float32(1), "one")],
    )
    first = branch("first", node("Mul", ["looped", "ten"], ["b"]), weights={"ten": np.float32(10)})
    later = branch("later", node("Identity", ["looped"], ["b"]))
    body = make.make_graph(
        [
            node("Loop", ["two", "", "state"], ["looped"], body=inner),
            node("Equal", ["i", "zero"], ["is_first"]),
            node("If", ["is_first"], ["next"], then_branch=first, else_branch=later),
        ],
        "body",
        [info("i", kinds.INT64, []), info("go", kinds.BOOL, []), info("state", shape=[3])],
        [info("go", kinds.BOOL, []), info("next", shape=[3])],
    )
    weights = {"n": np.array(3), "two": np.array(2), "zero": np.array(0)}
    found = unrolled(model_of([node("Loop", ["n", "", "x"], ["y"], body=body)], weights))
    assert not is_controlled(found)
    np.testing.assert_allclose(computed(found)[0], 10 * (X + 2) + 4)
    # Each body has one copy of its weights in each of its loops.
    assert sum(each.name.endswith(".one") for each in found.graph.initializer) == 3


def test_one_branch_that_differs_leaves_the_others_merged():
    alike = node(
        "If", ["is"], ["y"],
        then_branch=branch("a", node("Neg", ["x"], ["b"])),
        else_branch=branch("c", node("Abs", ["x"], ["b"])),
    )  # fmt: skip
    unlike = node(
        "If", ["is"], ["z"],
        then_branch=branch("d", node("Neg", ["x"], ["b"])),
        else_branch=branch("e", node("Concat", ["x", "x"], ["b"], axis=0)),
    )  # fmt: skip
    inputs = [info("is", kinds.BOOL, [])]
    found = merged(model_of([alike, unlike], inputs=inputs, outputs=("y", "z")))
    assert operators(found).count("If") == 1
    assert operators(found).count("Where") == 1


COLUMNS = node("Unsqueeze", ["k", "one"], ["column"])
SUMS = node("ReduceSum", ["rows", "one"], ["b"], keepdims=0)
# What runs only where ``k`` is as it must be: nodes, a right ``k``, a wrong one.
TRUSTING = {
    "Div": ([node("Div", ["numbers", "k"], ["r"]), node("Cast", ["r"], ["b"], to=kinds.FLOAT)],
            [2, -1, 3], [0, 1, 0]),
    "Mod": ([node("Mod", ["numbers", "k"], ["r"]), node("Cast", ["r"], ["b"], to=kinds.FLOAT)],
            [2, -1, 3], [0, 1, 0]),
    "Gather": ([node("Gather", ["x", "k"], ["b"])], [2, 0, -1], [7, 0, -9]),
    "GatherElements": ([node("GatherElements", ["x", "k"], ["b"])], [2, 0, -1], [7, 0, -9]),
    "GatherND": ([COLUMNS, node("GatherND", ["x", "column"], ["b"])], [2, 0, 1], [7, 0, -9]),
    "ScatterElements": ([node("ScatterElements", ["x", "k", "x"], ["b"])], [2, 0, 1], [7, 0, -9]),
    "ScatterND": ([COLUMNS, node("ScatterND", ["x", "column", "x"], ["b"])],
                  [2, 0, 1], [7, 0, -9]),
    "ReverseSequence": (
        [node("ReverseSequence", ["square", "k"], ["rows"], batch_axis=0, time_axis=1), SUMS],
        [2, 1, 3], [7, 1, -9]),
    "RoiAlign": (
        [node("RoiAlign", ["images", "boxes", "k"], ["regions"], output_height=1, output_width=1),
         node("Reshape", ["regions", "three"], ["b"])],
        [2, 0, 1], [7, 0, -9]),
}  # fmt: skip
CONSTANTS = {
    "numbers": np.array([7, -8, 9]),
    "one": np.array([1]),
    "three": np.array([3]),
    "square": np.arange(9, dtype="float32").reshape(3, 3),
    "images": np.arange(48, dtype="float32").reshape(3, 1, 4, 4),
    "boxes": np.array([[0, 0, 3, 3], [1, 1, 2, 2], [0, 1, 3, 2]], "float32"),
}
PLAIN = branch("plain", node("Identity", ["x"], ["b"]))


def guarded(nodes, *, is_then, condition="go", weights=None, inputs=(("go", kinds.BOOL, []),)):
    branches = [branch("trusting", *nodes), PLAIN][:: 1 if is_then else -1]
    choose = node("If", [condition], ["y"], then_branch=branches[0], else_branch=branches[1])
    inputs = [info("k", kinds.INT64, [3]), *(info(*each) for each in inputs)]
    return model_of([choose], CONSTANTS | (weights or {}), inputs=inputs)


@pytest.mark.parametrize("is_then", [True, False])
@pytest.mark.parametrize("operator", TRUSTING)
def test_a_branch_that_is_not_taken_does_no_harm(operator, is_then):
    nodes, right, wrong = TRUSTING[operator]
    model = guarded(nodes, is_then=is_then)
    found = merged(copy_of(model))
    assert not is_controlled(found)
    assert operators(found).count("Where") == 2
    for go, k in ((is_then, right), (not is_then, right), (not is_then, wrong)):
        feeds = {"go": np.array(go), "k": np.array(k)}
        with np.errstate(divide="raise", invalid="raise"):
            assert np.array_equal(computed(found, **feeds)[0], computed(model, **feeds)[0])


def test_branches_inside_of_branches_do_no_harm():
    nodes, right, wrong = TRUSTING["Div"]
    halved = [node("Cast", ["x"], ["whole"], to=kinds.INT64),
              node("Div", ["whole", "k"], ["r"]), nodes[1]]  # fmt: skip
    inner = node("If", ["really"], ["b"], then_branch=branch("trusting", *nodes),
                 else_branch=branch("halved", *halved))  # fmt: skip
    switches = [("go", kinds.BOOL, []), ("really", kinds.BOOL, [])]
    model = guarded([inner], is_then=True, inputs=switches)
    found = merged(copy_of(model))
    assert not is_controlled(found)
    for go, really, k in ((1, 1, right), (1, 0, right), (0, 1, wrong), (0, 0, wrong)):
        feeds = {"go": np.array(go, bool), "really": np.array(really, bool), "k": np.array(k)}
        with np.errstate(divide="raise"):
            assert np.array_equal(computed(found, **feeds)[0], computed(model, **feeds)[0])


@pytest.mark.parametrize(
    "nodes",
    [
        [node("Div", ["x", "x"], ["b"])],
        [node("Add", ["ends", "one"], ["k2"]), node("Gather", ["x", "k2"], ["b"])],
        [node("Shape", ["x"], ["s"]), node("Div", ["numbers", "s"], ["r"]),
         node("Cast", ["r"], ["b"], to=kinds.FLOAT)],
    ],
)  # fmt: skip
def test_floats_and_constants_need_no_guard(nodes):
    found = merged(guarded(nodes, is_then=True, weights={"ends": np.array([0, 1, 0])}))
    assert not is_controlled(found)
    assert operators(found).count("Where") == 1
