"""Match a network's functions with the nodes of another framework, by what they compute. Pure.

Both sides become work with a signature: what kind, which extents, and how long a reduction.
Names say nothing: frameworks fuse and rename. Extents are sorted and without ones, so that
layouts make no difference.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Shape = tuple[int, ...]

CONVOLUTION = "convolution"
DEPTHWISE = "depthwise"
GROUPED = "grouped convolution"
TRANSPOSED = "transposed convolution"
PRODUCT = "matrix product"
BATCHED = "batched product"
ATTENTION = "fused attention"
POOLING = "pooling"
REDUCTION = "mean or norm"
SOFTMAX = "softmax"
RESIZE = "resize"
CONCAT = "concat"
COPY = "copy"
ELEMENTWISE = "elementwise"
OTHER = "other"

# Work that is often fused into other functions.
_LIGHT = {RESIZE, CONCAT, COPY, ELEMENTWISE}
# Which block of a function without a reduction stands for it, first to last.
_LEADERS = (ATTENTION, CONCAT, RESIZE, ELEMENTWISE, COPY)

# Kinds of blocks without a reduction by words of their names.
_BY_WORD = {"attention": ATTENTION, "concat": CONCAT, "resize": RESIZE, "normalization": REDUCTION}
# Blocks of ``models.whole_tiles`` and ``models.grouped``: what is left of wide results, or without
# an axis of groups, and a copy with more columns.
_CUTS, _WIDENED = ("rows", "columns", "channels"), "columns_pad"

# By kind, OpenVINO's types of layers in a compiled model.
_OPENVINO_NAMES = {
    CONVOLUTION: "Convolution",
    TRANSPOSED: "Deconvolution",
    PRODUCT: "FullyConnected MatMul",
    ATTENTION: "ScaledDotProductAttention MHA",
    POOLING: "Pooling AdaptivePooling",
    REDUCTION: "Reduce MVN NormalizeL2 RMSNorm",
    SOFTMAX: "Softmax LogSoftmax",
    RESIZE: "Interpolate",
    CONCAT: "Concatenation",
    COPY: "Reorder Transpose Reshape Split StridedSlice Gather Pad Tile Broadcast Convert "
    "ShuffleChannels SpaceToDepth DepthToSpace Output",
    ELEMENTWISE: "Eltwise Subgraph Math Select",
}
_OPENVINO = {name: kind for kind, text in _OPENVINO_NAMES.items() for name in text.split()}


class Signature(NamedTuple):
    """What work is matched by."""

    kind: str
    # Of the output, or of a reduction's input; sorted, without ones. Only their product where
    # a reshape would make no difference.
    extents: Shape
    reduction: int = 0  # multiply-adds for each value of the output


@dataclasses.dataclass(frozen=True)
class Work:
    """A function or a node, and how long its calls in an inference take together."""

    name: str
    signature: Signature
    words: str
    ms: float = 0.0
    calls: int = 1
    flop: float = 0.0  # of one call
    limit_ms: float = 0.0  # of one call by the roofline
    # What is fused into it beside what the signature says: of other extents, and of the same.
    parts: tuple[Signature, ...] = ()
    endings: tuple[Signature, ...] = ()


class Block(NamedTuple):
    """A block of a tensor function."""

    name: str
    shape: Shape  # of what it writes
    reduction: Shape  # the extents of its reduction
    reads: tuple[Shape, ...]


class Node(NamedTuple):
    """A node that a framework has run."""

    name: str
    kind: str  # the framework's own
    inputs: tuple[Shape, ...]
    output: Shape
    ms: float
    origins: str = ""  # the names in the model that it comes from


@dataclasses.dataclass
class Group:
    """All work of one signature, on both sides."""

    words: str
    calls: int = 0
    peer_calls: int = 0
    ms: float = 0.0
    peer_ms: float = 0.0
    peer_shared_ms: float = 0.0  # of it, what was matched by what ours contains
    flop: float = 0.0
    limit_ms: float = 0.0
    names: list[str] = dataclasses.field(default_factory=list)
    peer_names: list[str] = dataclasses.field(default_factory=list)

    @property
    def behind_ms(self) -> float:
        """How much longer ours takes."""
        return self.ms - self.peer_ms

    @property
    def gflops(self) -> float:
        """Operations in ours per nanosecond; 0 without any."""
        return self.flop / self.ms / 1e6 if self.ms > 0 else 0.0

    @property
    def share(self) -> float:
        """The least time by the roofline over ours; 0 without ours."""
        return self.limit_ms / self.ms if self.ms > 0 else 0.0


def extents_of(shape: Iterable[int]) -> Shape:
    """Return a shape in the form that layouts share."""
    return tuple(sorted((n for n in shape if n != 1), reverse=True))


def _bulk(kind: str, shape: Shape) -> Signature:
    """Return the signature of work that treats a tensor as a list of values, or of rows."""
    is_list = kind in (ELEMENTWISE, COPY, SOFTMAX)
    return Signature(kind, (math.prod(shape),) if is_list else extents_of(shape))


def work_of_blocks(
    name: str,
    blocks: Sequence[Block],
    anchor: str,
    *,
    channels_last: bool,
    flop: float = 0.0,
) -> Work:
    """Return the work of a tensor function of ours.

    Parameters
    ----------
    name : str
    blocks : sequence of Block
        In their order; none of a function that is no loop nest.
    anchor : str
        The name of its heaviest block with a reduction, or "".
    channels_last : bool
        Whether four extents are N, H, W, C: only words depend on that.
    flop : float
        As counted in the loops.
    """
    if not blocks:
        return Work(name, Signature(OTHER, (), 0), f"other: {name}", flop=flop)
    if any("softmax" in block.name for block in blocks):
        last = blocks[-1].shape
        return Work(name, _bulk(SOFTMAX, last), _words(SOFTMAX, last), flop=flop)
    blocks = _as_asked(blocks)
    named = {block.name: block for block in blocks}
    leader = named.get(anchor) or _leader(blocks)
    signature, words, skipped = _of_block(leader, named, channels_last=channels_last)
    parts: dict[bool, list[Signature]] = {True: [], False: []}
    for block in blocks:
        kind, is_end = _kind(block), math.prod(block.shape) == math.prod(leader.shape)
        # A mean is a sum that is divided.
        is_mean = is_end and _kind(leader) in (POOLING, REDUCTION) and _is_average(block)
        if block is not leader and kind in _LIGHT and not _is_padding(block) and not is_mean:
            parts[is_end].append(_bulk(kind, block.shape))
    return Work(
        name,
        signature,
        words,
        flop=flop - skipped,
        parts=tuple(parts[False]),
        endings=tuple(parts[True]),
    )


def _as_asked(blocks: Sequence[Block]) -> Sequence[Block]:
    """Return blocks without the rows and columns that are computed for whole tiles alone."""
    cut = next((block for block in blocks if block.name in _CUTS), None)
    if cut is None:
        return blocks
    wide = blocks[blocks.index(cut) - 1]
    return [
        block._replace(shape=cut.shape) if block is wide else block
        for block in blocks
        if block.name not in (*_CUTS, _WIDENED)
    ]


def _leader(blocks: Sequence[Block]) -> Block:
    """Return the block that stands for a function without an anchor."""
    for kind in _LEADERS:
        if of_kind := [block for block in blocks if _kind(block) == kind]:
            return max(of_kind, key=lambda block: math.prod(block.shape))
    return blocks[-1]


def _is_average(block: Block) -> bool:
    return "divide" in block.name or "avg" in block.name


def _is_padding(block: Block) -> bool:
    return "pad" in block.name or "dilate" in block.name


def _kind(block: Block) -> str:
    """Return what a block does, by its reduction, or else by its name in TOPI."""
    if block.reduction:
        if "conv" in block.name:
            return TRANSPOSED if "transpose" in block.name else CONVOLUTION
        if "pool" in block.name:
            return POOLING
        return PRODUCT if len(block.reads) > 1 else REDUCTION
    copies = ("transpose", "slice", "reshape", "squeeze", "expand", "take", "split", "layout")
    for word, kind in _BY_WORD.items():
        if word in block.name:
            return kind
    is_copy = _is_padding(block) or any(word in block.name for word in copies)
    return COPY if is_copy else ELEMENTWISE


def _of_block(
    block: Block, named: Mapping[str, Block], *, channels_last: bool
) -> tuple[Signature, str, float]:
    """Return signature and words of a block, and operations that it counts in vain."""
    kind, shape = _kind(block), block.shape
    if kind in (CONVOLUTION, TRANSPOSED):
        # TOPI names convolutions by the layout of their data, as conv2d_nhwc.
        is_last = block.name.endswith("c")
        weight = block.reads[1]
        # Filters may have an axis of groups.
        kernel = weight[: len(shape) - 2] if is_last else weight[2:]
        length = math.prod(block.reduction)
        n_inputs = max(1, length // math.prod(kernel))
        spread = next((each for each in named.values() if "dilate" in each.name), None)
        if kind == TRANSPOSED and spread is None:
            n_inputs = block.reduction[-1]  # the others are the elements that meet a result
        if kind == CONVOLUTION and "group" in block.name:
            kind = DEPTHWISE if n_inputs == 1 else GROUPED
        shape = _channels_first(shape) if is_last else shape
        skipped = 0.0
        if kind == TRANSPOSED and spread is not None:
            # The zeros between the values of the input are multiplied, too.
            useful = math.prod(spread.reads[0]) / math.prod(spread.shape)
            skipped = 2.0 * math.prod(shape) * length * (1.0 - useful)
        return (*_convolution(kind, kernel, n_inputs, shape), skipped)
    if kind == PRODUCT:
        return (*_product(shape, math.prod(block.reduction), block.reads), 0.0)
    if channels_last and len(shape) == 4:
        shape = _channels_first(shape)
    if kind == POOLING and math.prod(shape[2:]) > 1:
        return Signature(kind, extents_of(shape)), _words(kind, shape), 0.0
    if kind in (POOLING, REDUCTION):
        data = block.reads[0]
        data = _channels_first(data) if channels_last and len(data) == 4 else data
        return Signature(REDUCTION, extents_of(data)), _words(REDUCTION, data), 0.0
    return _bulk(kind, shape), _words(kind, shape), 0.0


def _channels_first(shape: Shape) -> Shape:
    return (shape[0], shape[-1], *shape[1:-1])


def _convolution(kind: str, kernel: Shape, n_inputs: int, shape: Shape) -> tuple[Signature, str]:
    """Return signature and words of a convolution with so many input channels per group."""
    words = f"{kind} {'x'.join(map(str, kernel))}"
    if kind != DEPTHWISE:
        words += f" of {n_inputs}"
    # A product of matrices in everything but its name.
    is_product = kind == CONVOLUTION and set(kernel) == {1}
    length = n_inputs * math.prod(kernel)
    n_images, n_filters, *places = shape
    matrix = (n_images * math.prod(places), n_filters)
    extents = extents_of(matrix if is_product else shape)
    signature = Signature(PRODUCT if is_product else kind, extents, length)
    return signature, _words(words, shape)


def _product(shape: Shape, length: int, operands: Sequence[Shape]) -> tuple[Signature, str]:
    """Return signature and words of products of so many numbers each."""
    # One matrix for the whole batch is a product with more rows.
    if len(operands[1]) == 2:
        shape = (math.prod(shape[:-1]), *shape[-1:])
    kind = BATCHED if math.prod(shape[:-2]) > 1 else PRODUCT
    return Signature(PRODUCT, extents_of(shape), length), _words(f"{kind} of {length}", shape)


def _words(kind: str, shape: Shape) -> str:
    return f"{kind}, {'x'.join(map(str, shape)) or '1'}"


def openvino_work(node: Node) -> Work:
    """Return the work of a node of OpenVINO; its ``kind`` is the type of the layer."""
    kind = _OPENVINO.get(node.kind, OTHER)
    if kind == ELEMENTWISE and "MatMul" in node.origins:
        kind = ATTENTION  # its products and softmax are in one kernel
    shape, data = node.output, node.inputs[0] if node.inputs else node.output
    if kind in (CONVOLUTION, TRANSPOSED) and len(node.inputs) > 1:
        n_groups, weight = 1, node.inputs[1]
        # The number of groups stands before the weight's other extents.
        if len(weight) > len(shape):
            n_groups, weight = weight[0], weight[1:]
        n_inputs = weight[1] if kind == CONVOLUTION else max(1, data[1] // n_groups)
        if kind == CONVOLUTION and n_groups > 1:
            kind = DEPTHWISE if n_inputs == 1 else GROUPED
        signature, words = _convolution(kind, weight[2:], n_inputs, shape)
    elif kind == PRODUCT:
        rows = max(1, math.prod(shape[:-1]))
        signature, words = _product(shape, math.prod(data) // rows, node.inputs)
    elif kind == POOLING and math.prod(shape[2:]) > 1:
        signature, words = Signature(kind, extents_of(shape)), _words(kind, shape)
    elif kind in (POOLING, REDUCTION):
        signature, words = Signature(REDUCTION, extents_of(data)), _words(REDUCTION, data)
    elif kind == OTHER:
        signature = Signature(f"{OTHER}: {node.kind}", extents_of(shape))
        words = _words(signature.kind, shape)
    else:
        signature, words = _bulk(kind, shape), _words(kind, shape)
    return Work(node.name, signature, words, node.ms)


def match(ours: Sequence[Work], peer: Sequence[Work]) -> list[Group]:
    """Group the work of both sides, the group that is furthest behind first.

    Light work of the peer (elementwise, copy, resize, concat) that ours has within other
    functions counts for their groups, in shares by calls: first for functions that contain
    it beside a result of other extents, then for those that end with it. What neither
    side's signatures match stays alone, with nothing on the other side.
    """
    groups: dict[Signature, Group] = {}
    contained: dict[Signature, Counter[Signature]] = {}
    ending: dict[Signature, Counter[Signature]] = {}
    for work in ours:
        group = groups.setdefault(work.signature, Group(work.words))
        group.calls += work.calls
        group.ms += work.ms
        group.flop += work.calls * work.flop
        group.limit_ms += work.calls * work.limit_ms
        group.names.append(work.name)
        if work.signature.kind in _LIGHT:
            own = contained.setdefault(work.signature, Counter())
            own[work.signature] += work.calls
        for takers, parts in ((contained, work.parts), (ending, work.endings)):
            for part in parts:
                takers.setdefault(part, Counter())[work.signature] += work.calls
    for each in peer:
        key = each.signature
        shares = contained.get(key) or ending.get(key) or Counter({key: 1})
        for taker, share in shares.items():
            group = groups.setdefault(taker, Group(each.words))
            part_ms = each.ms * share / shares.total()
            group.peer_ms += part_ms
            if taker != key:
                group.peer_shared_ms += part_ms
        if key in shares:
            groups[key].words = each.words  # its layout is the model's own
            groups[key].peer_calls += each.calls
            groups[key].peer_names.append(each.name)
    return sorted(groups.values(), key=lambda group: -group.behind_ms)


COLUMNS = ("group", "calls", "ours ms", "peer ms", "behind ms", "GFLOP/s", "roofline %")


def table(groups: Sequence[Group], whole_ms: tuple[float, float], top: int, peer: str) -> str:
    """Return the groups furthest behind as text; the rows sum up to the last one.

    Parameters
    ----------
    groups : sequence of Group
        In their order.
    whole_ms : (float, float)
        A whole inference without profiling: ours and the peer's.
    top : int
        How many groups have a row of their own.
    peer : str
        Its name.
    """
    shown, rest = groups[:top], groups[top:]
    rows = [_row(group) for group in shown]
    if rest:
        rows.append(_row(_sum(f"{len(rest)} other groups", rest)))
    every = _sum("all functions", groups)
    outside = Group(
        "outside of functions", ms=whole_ms[0] - every.ms, peer_ms=whole_ms[1] - every.peer_ms
    )
    rows += [
        _row(each)
        for each in (every, outside, Group("whole inference", ms=whole_ms[0], peer_ms=whole_ms[1]))
    ]
    head = [name.replace("peer", peer) for name in COLUMNS]
    return aligned(head, rows)


def _row(group: Group) -> list[str]:
    calls = f"{group.calls}/{group.peer_calls}" if group.calls or group.peer_calls else ""
    return [
        group.words,
        calls,
        f"{group.ms:.3f}",
        f"{group.peer_ms:.3f}",
        f"{group.behind_ms:+.3f}",
        f"{group.gflops:.1f}" if group.flop else "",
        f"{100 * group.share:.0f}" if group.limit_ms else "",
    ]


def _sum(words: str, groups: Sequence[Group]) -> Group:
    total = Group(words)
    for group in groups:
        total.calls += group.calls
        total.peer_calls += group.peer_calls
        total.ms += group.ms
        total.peer_ms += group.peer_ms
        total.flop += group.flop
        total.limit_ms += group.limit_ms
    return total


def aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as plain text: the first column to the left, numbers to the right."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def as_fields(group: Group) -> dict[str, Any]:
    """Return a group as a row of JSON."""
    return {
        **dataclasses.asdict(group),
        "behind_ms": group.behind_ms,
        "gflops": group.gflops,
        "roofline_share": group.share,
    }
