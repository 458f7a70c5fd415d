"""Extents of inputs that a model leaves open: their names, a proposal, and the message."""

from __future__ import annotations

import dataclasses
import itertools
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence

from tvm_adaptive.models.network import shape_text

# An open extent without a name; it belongs to its input and its place.
NAMELESS = "?"

# What published models take: classifiers, detectors, lines of text.
_SIZES = ((224, 224), (320, 320), (640, 640), (48, 320), (48, 192), (32, 320), (256, 256), (64, 64))
_HEIGHTS, _WIDTHS = (tuple(dict.fromkeys(each)) for each in zip(*_SIZES, strict=True))
# Words, frames of sound at 16 kHz, spectrograms.
_LENGTHS = (16, 128, 512, 576, 1, 80, 160, 256, 1024, 16000)
_OTHERS = (1, 16, 128, 512, 576, 64, 80, 160, 224, 256)
_CHANNEL_COUNTS = (3, 1)
_MAX_CHANNELS = 4

_BATCH = re.compile(r"(n|b|bs|bsz|(.*[^a-z])?batch([^a-z].*)?|batch_?size.*|num_?(images|samples))")
_CHANNELS = re.compile(r"(c|(.*[^a-z])?channels?([^a-z].*)?)")
# By names of extents; the first that fits counts.
_LIKELY: dict[re.Pattern[str], tuple[int, ...]] = {
    _BATCH: (1,),
    _CHANNELS: _CHANNEL_COUNTS,
    re.compile(r"(h|(.*[^a-z])?(height|rows)([^a-z].*)?)"): _HEIGHTS,
    re.compile(r"(w|(.*[^a-z])?(width|cols|columns)([^a-z].*)?)"): _WIDTHS,
    re.compile(r".*(seq|length|len|token|time|frame|sample|words|chunk).*"): _LENGTHS,
}
# Another length is likelier than a batch of several.
_BATCH_STEP = 3
_MAX_PROPOSALS = 64

Key = tuple[str, int]  # of an open extent


@dataclasses.dataclass(frozen=True)
class InputShape:
    """The declared shape of an input."""

    name: str
    # Numbers, names of open extents, or NAMELESS; None if not even the rank is declared.
    extents: tuple[int | str, ...] | None

    @property
    def is_open(self) -> bool:
        """Whether something is left open."""
        return self.extents is None or any(isinstance(each, str) for each in self.extents)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The extents that are numbers: all of them where none is open."""
        return tuple(each for each in self.extents or () if isinstance(each, int))

    @property
    def text(self) -> str:
        """The shape in words: ``batchx3x?x?``."""
        if self.extents is None:
            return "of any rank"
        return shape_text(self.extents)

    def with_values(self, values: Mapping[Key, int]) -> InputShape:
        """Return the shape with the open extents that have a value."""
        if self.extents is None:
            return self
        found = (
            values.get(key_of(self.name, place, each), each) if isinstance(each, str) else each
            for place, each in enumerate(self.extents)
        )
        return InputShape(self.name, tuple(found))


def open_message(
    source: str, inputs: Sequence[InputShape], proposal: Mapping[str, Sequence[int]]
) -> str:
    """Return one line with all open extents of a model, and a command that fixes them."""
    found = [each for each in inputs if each.is_open]
    listed = "; ".join(f"{each.name} is {each.text}" for each in found)
    nameless = any(NAMELESS in (each.extents or ()) for each in found)
    options = " ".join(
        f"--input-shape {shlex.quote(f'{name}={shape_text(extents)}')}"
        for name, extents in proposal.items()
    )
    command = f"tvm-adaptive tune {shlex.quote(source)} {options}"
    return (
        f"The shapes of inputs of {source} are open: {listed}"
        f"{' (? has no name)' if nameless else ''}. Fix them, for example with: {command} "
        "(or by arrays, with --inputs FILE.npz; input_shapes and inputs in Python)"
    )


def proposals(inputs: Sequence[InputShape]) -> Iterator[dict[str, tuple[int, ...]]]:
    """Yield shapes for the inputs that are open, the likeliest first."""
    choices: dict[tuple[Key, ...], Sequence[tuple[int, ...]]] = {}
    taken: set[Key] = set()
    for each in inputs:
        for keys, values in _choices_of(each):
            if not taken.intersection(keys):
                taken.update(keys)
                choices[keys] = values
    groups = list(choices)
    # Likely values of all come before unlikely ones of any.
    indices = itertools.product(*(range(len(choices[keys])) for keys in groups))
    steps = [_BATCH_STEP if choices[keys][0] == (1,) else 1 for keys in groups]

    def unlikeliness(places: Sequence[int]) -> int:
        return sum(place * step for place, step in zip(places, steps, strict=True))

    ranked = sorted(itertools.islice(indices, 100_000), key=unlikeliness)
    for chosen in ranked[:_MAX_PROPOSALS]:
        values_of: dict[Key, int] = {}
        for keys, index in zip(groups, chosen, strict=True):
            values_of.update(zip(keys, choices[keys][index], strict=True))
        opens = [each.with_values(values_of) for each in inputs if each.is_open]
        yield {each.name: (1,) if each.extents is None else each.numbers for each in opens}


def key_of(name: str, place: int, extent: str) -> Key:
    """Return what tells an open extent from others: its name, or its input and place."""
    return (name, place) if extent == NAMELESS else (extent, -1)


def _choices_of(
    shape: InputShape,
) -> Iterator[tuple[tuple[Key, ...], Sequence[tuple[int, ...]]]]:
    """Yield groups of open extents with the values that they may have together."""
    extents = shape.extents or ()
    height, width, channels = _image_places(extents)
    keys = {
        place: key_of(shape.name, place, extent)
        for place, extent in enumerate(extents)
        if isinstance(extent, str)
    }
    is_pair = height in keys and width in keys and keys[height] != keys[width]
    if is_pair:
        yield (keys[height], keys[width]), _SIZES
    for place, key in keys.items():
        if is_pair and place in (height, width):
            continue
        values: Sequence[int] = _values_of(str(extents[place]).lower(), place, len(extents))
        if place == channels:
            values = _CHANNEL_COUNTS
        elif place in (height, width):
            values = _WIDTHS if place == width else _HEIGHTS
        yield (key,), [(value,) for value in values]


def _image_places(extents: Sequence[int | str]) -> tuple[int, int, int]:
    """Return the places of height, width and open channels; -1 for each that is none."""
    if len(extents) != 4:
        return -1, -1, -1
    last, second = extents[3], extents[1]
    if isinstance(last, int) and last <= _MAX_CHANNELS and not isinstance(second, int):
        return 1, 2, -1
    if isinstance(second, str):
        is_channel = second == NAMELESS or _CHANNELS.fullmatch(second.lower())
        return (2, 3, 1) if is_channel else (-1, -1, -1)
    return (2, 3, -1) if second <= _MAX_CHANNELS else (-1, -1, -1)


def _values_of(name: str, place: int, rank: int) -> Sequence[int]:
    """Return likely values of an open extent."""
    for pattern, values in _LIKELY.items():
        # A single letter names a batch only in the first place.
        if pattern.fullmatch(name) and (pattern is not _BATCH or place == 0 or len(name) > 1):
            return values
    if place == 0 and rank > 1:
        # Almost always the batch, whatever an exporter calls it.
        return (1,) if rank > 2 else (1, *_OTHERS[1:])
    # The last of two is a length: words, or frames of sound.
    return _LENGTHS if (place, rank) in ((1, 2), (0, 1)) else _OTHERS
