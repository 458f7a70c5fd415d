from __future__ import annotations

import itertools

import pytest

from tvm_adaptive.models.frontend.open_extents import InputShape, open_message, proposals


def first_of(*shapes: InputShape) -> dict[str, tuple[int, ...]]:
    return next(proposals(shapes))


@pytest.mark.parametrize(
    ("extents", "shape"),
    [
        (("N", 3, "H", "W"), (1, 3, 224, 224)),
        (("batch_size", 3, "?", "?"), (1, 3, 224, 224)),
        (("?", "height", "width", 3), (1, 224, 224, 3)),
        (("s0", 80, "s1"), (1, 80, 1)),
        (("batch", "sequence_length"), (1, 16)),
        (("DynamicDimension.0", "?"), (1, 16)),
        (("n", 4), (1, 4)),
        ((2, "batch", 128), (2, 1, 128)),
        (("batch", "n"), (1, 16)),
        ((1, "channels", 8, 8), (1, 3, 8, 8)),
        (None, (1,)),
    ],
)
def test_the_likeliest_shape_comes_first(extents, shape):
    assert first_of(InputShape("x", extents)) == {"x": shape}


def test_a_name_has_one_value_in_all_inputs_and_others_differ():
    found = list(
        proposals(
            [InputShape("a", ("n", "k", "?")), InputShape("b", ("k", "?")), InputShape("c", (7,))]
        )
    )
    assert all(each["a"][1] == each["b"][0] for each in found)
    assert any(each["a"][2] != each["b"][1] for each in found)
    assert all(set(each) == {"a", "b"} for each in found)


def test_height_and_width_vary_together_until_one_fits():
    sizes = [each["x"][2:] for each in proposals([InputShape("x", (1, 3, "?", "w"))])]
    assert (48, 320) in sizes
    assert len(sizes) == len(set(sizes)) < 20
    many = [InputShape(f"x{n}", ("?", "?", "?", "?", "?")) for n in range(5)]
    assert len(list(itertools.islice(proposals(many), 100))) == 64


def test_the_message_holds_all_inputs_and_a_command():
    inputs = [InputShape("my image", ("n", 3)), InputShape("y", (2,)), InputShape("z", None)]
    text = open_message("a net.onnx", inputs, {"my image": (1, 3), "z": (1,)})
    assert "my image is nx3; z is of any rank." in text
    assert "tvm-adaptive tune 'a net.onnx' --input-shape 'my image=1x3' --input-shape z=1 " in text
