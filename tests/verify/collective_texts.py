"""Texts of modules with collectives, and of the same collectives in phases: what the judge has to tell apart."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Groups = Sequence[Sequence[int]]

_OPTIONS = (
    "input_output_alias={ {}: (0, {}, may-alias) }, entry_computation_layout={(f32[8]{0})->f32[]}"
)
_REDUCERS = "".join(
    f"""
%{opcode}.f (a.{opcode}: f32[], b.{opcode}: f32[]) -> f32[] {{
  %a.{opcode} = f32[] parameter(0)
  %b.{opcode} = f32[] parameter(1)
  ROOT %c.{opcode} = f32[] {opcode}(%a.{opcode}, %b.{opcode})
}}
"""
    for opcode in ("add", "maximum", "multiply")
)


@dataclass(frozen=True)
class Case:
    """A plain module and the same with other collectives."""

    plain: str
    shaped: str
    partitions: int = 8
    wire: str | None = None


class Lines:
    """Instructions of a computation, one by one."""

    def __init__(self, channel: int = 1) -> None:
        self.lines: list[str] = []
        self._channels = itertools.count(channel)

    def put(self, name: str, shape: str, call: str) -> str:
        self.lines.append(f"  %{name} = {shape} {call}")
        return name

    def send(
        self, name: str, shape: str, kind: str, operand: str, groups: Groups, more: str = ""
    ) -> str:
        """A collective."""
        if kind in ("all-reduce", "reduce-scatter"):
            more += ", to_apply=%add.f"
        flag = "" if kind == "all-to-all" else ", use_global_device_ids=true"
        sent = f"channel_id={next(self._channels)}, replica_groups={written(groups)}{flag}{more}"
        return self.put(name, shape, f"{kind}({operand}), {sent}")

    def computation(self, name: str, parameters: str = "x: f32[]", entry: bool = False) -> str:
        """The whole, whose last instruction is the result."""
        *lines, last = self.lines
        head = f"{'ENTRY ' if entry else ''}%{name} ({parameters}) -> f32[] {{"
        return "\n".join([head, *lines, last.replace("  %", "  ROOT %", 1), "}"])


def module(entry: Lines, *computations: str) -> str:
    head = f"HloModule jit_step, {_OPTIONS}\n{_REDUCERS}"
    return "\n\n".join([head, *computations, entry.computation("main", entry=True)]) + "\n"


def written(groups: Groups) -> str:
    return "{" + ",".join("{" + ",".join(map(str, group)) + "}" for group in groups) + "}"


def along(sizes: Sequence[int], *levels: int) -> list[list[int]]:
    """Groups of devices that differ in their places at these levels alone, outermost first."""
    strides = [math.prod(sizes[level + 1 :]) for level in range(len(sizes))]
    fixed_levels = [level for level in range(len(sizes)) if level not in levels]

    def numbers(axes: Sequence[int]) -> list[int]:
        places = itertools.product(*(range(sizes[level]) for level in axes))
        return [
            sum(at * strides[level] for at, level in zip(place, axes, strict=True))
            for place in places
        ]

    return [[start + offset for offset in numbers(levels)] for start in numbers(fixed_levels)]


def brackets(dims: Sequence[int]) -> str:
    return f"f32[{','.join(map(str, dims))}]"


INSIDE, ACROSS, ALL = along((2, 4), 1), along((2, 4), 0), along((2, 4), 0, 1)
# what is summed: 46 elements, of which two hosts of four have 48 with padding
MEMBERS = ((3, 5), (7,), (4, 6))
Phases = Callable[[Lines, str, int], str]


def scattering(*levels: Groups) -> Phases:
    """Reduce-scatters within these groups, one behind the other, an all-reduce in the last, and all-gathers back."""

    def write(lines: Lines, operand: str, size: int) -> str:
        (*down, last), sizes = levels, [size]
        for number, groups in enumerate(down):
            sizes.append(sizes[-1] // len(groups[0]))
            shape, more = brackets(sizes[-1:]), ", dimensions={0}"
            operand = lines.send(
                f"{operand}.d{number}", shape, "reduce-scatter", f"%{operand}", groups, more
            )
        operand = lines.send(
            f"{operand}.m", brackets(sizes[-1:]), "all-reduce", f"%{operand}", last
        )
        for number, groups in reversed(list(enumerate(down))):
            sizes.pop()
            shape, more = brackets(sizes[-1:]), ", dimensions={0}"
            operand = lines.send(
                f"{operand}.u{number}", shape, "all-gather", f"%{operand}", groups, more
            )
        return operand

    return write


def one_by_one(*levels: Groups) -> Phases:
    """All-reduces with optimization barriers between."""

    def write(lines: Lines, operand: str, size: int) -> str:
        for number, groups in enumerate(levels):
            if number:
                operand = lines.put(f"{operand}.b", brackets([size]), f"opt-barrier(%{operand})")
            operand = lines.send(
                f"{operand}.r{number}", brackets([size]), "all-reduce", f"%{operand}", groups
            )
        return operand

    return write


def exchanging(inner: Groups, outer: Groups) -> Phases:
    """Reduce-scatters as slices, an all-to-all of as many arrays as devices, and adds."""

    def write(lines: Lines, operand: str, size: int) -> str:
        part = size // len(inner[0])
        piece = _exchange(
            lines, operand, brackets([part]), [part * at for at in range(len(inner[0]) + 1)], inner
        )
        piece = lines.send(f"{operand}.m", brackets([part]), "all-reduce", f"%{piece}", outer)
        return lines.send(
            f"{operand}.u", brackets([size]), "all-gather", f"%{piece}", inner, ", dimensions={0}"
        )

    return write


def _exchange(lines: Lines, operand: str, shape: str, marks: Sequence[int], groups: Groups) -> str:
    """The sum of what the devices of a group have of one's own part."""
    parts = [
        lines.put(f"{operand}.s{at}", shape, f"slice(%{operand}), slice={{[{low}:{high}]}}")
        for at, (low, high) in enumerate(itertools.pairwise(marks))
    ]
    received = lines.send(
        f"{operand}.x",
        f"({', '.join([shape] * len(parts))})",
        "all-to-all",
        ", ".join(f"%{p}" for p in parts),
        groups,
    )
    got = [
        lines.put(f"{operand}.g{at}", shape, f"get-tuple-element(%{received}), index={at}")
        for at in range(len(parts))
    ]
    total = got[0]
    for at, term in enumerate(got[1:]):
        total = lines.put(f"{operand}.a{at}", shape, f"add(%{total}, %{term})")
    return total


def rounding(inner: Groups, outer: Groups, wire: str = "bf16", tuples: bool = False) -> Phases:
    """The hosts exchange pieces as bits of a smaller type, and sum them in float32."""

    def write(lines: Lines, operand: str, size: int) -> str:
        part, hosts = size // len(inner[0]), len(outer[0])
        m, n = part // hosts, operand
        piece = lines.send(
            f"{n}.d", brackets([part]), "reduce-scatter", f"%{n}", inner, ", dimensions={0}"
        )
        rows = f"[{hosts},{m}]"
        at = lines.put(f"{n}.rows", f"f32{rows}", f"reshape(%{piece})")
        at = lines.put(f"{n}.small", f"{wire}{rows}", f"convert(%{at})")
        at = lines.put(f"{n}.bits", f"u16{rows}", f"bitcast-convert(%{at})")
        at = _by_tuples(lines, at, hosts, m, outer) if tuples else _by_array(lines, at, rows, outer)
        at = lines.put(f"{n}.halves", f"{wire}{rows}", f"bitcast-convert(%{at})")
        at = lines.put(f"{n}.floats", f"f32{rows}", f"convert(%{at})")
        zero = lines.put(f"{n}.from", "f32[]", "constant(0)")
        at = lines.put(
            f"{n}.sum", f"f32[{m}]", f"reduce(%{at}, %{zero}), dimensions={{0}}, to_apply=%add.f"
        )
        at = lines.put(f"{n}.again", f"{wire}[{m}]", f"convert(%{at})")
        at = lines.put(f"{n}.out", f"u16[{m}]", f"bitcast-convert(%{at})")
        at = lines.send(
            f"{n}.far", f"u16[{part}]", "all-gather", f"%{at}", outer, ", dimensions={0}"
        )
        at = lines.put(f"{n}.back", f"{wire}[{part}]", f"bitcast-convert(%{at})")
        at = lines.put(f"{n}.whole", f"f32[{part}]", f"convert(%{at})")
        return lines.send(
            f"{n}.u", f"f32[{size}]", "all-gather", f"%{at}", inner, ", dimensions={0}"
        )

    return write


def _by_array(lines: Lines, operand: str, rows: str, groups: Groups) -> str:
    return lines.send(
        f"{operand}.x", f"u16{rows}", "all-to-all", f"%{operand}", groups, ", dimensions={0}"
    )


def _by_tuples(lines: Lines, operand: str, hosts: int, m: int, groups: Groups) -> str:
    shape = f"u16[1,{m}]"
    parts = [
        lines.put(
            f"{operand}.s{at}", shape, f"slice(%{operand}), slice={{[{at}:{at + 1}], [0:{m}]}}"
        )
        for at in range(hosts)
    ]
    sent = ", ".join(f"%{part}" for part in parts)
    got = lines.send(f"{operand}.x", f"({', '.join([shape] * hosts)})", "all-to-all", sent, groups)
    pieces = [
        lines.put(f"{operand}.g{at}", shape, f"get-tuple-element(%{got}), index={at}")
        for at in range(hosts)
    ]
    listed = ", ".join(f"%{piece}" for piece in pieces)
    return lines.put(
        f"{operand}.all", f"u16[{hosts},{m}]", f"concatenate({listed}), dimensions={{0}}"
    )


def bucket(
    lines: Lines,
    mark: str,
    members: Sequence[tuple[str, str, Sequence[int]]],
    multiple: int,
    do: Phases,
) -> None:
    """Sums of members, each a source, the name of its sum and its sizes, together."""
    sizes = [math.prod(dims) for _, _, dims in members]
    flat = [
        lines.put(f"{result}.flat", brackets([size]), f"reshape(%{source})")
        for (source, result, _), size in zip(members, sizes, strict=True)
    ]
    total = sum(sizes)
    whole = flat[0]
    if len(flat) > 1:
        listed = ", ".join(f"%{part}" for part in flat)
        whole = lines.put(
            f"{mark}.cat", brackets([total]), f"concatenate({listed}), dimensions={{0}}"
        )
    if padding := -total % multiple:
        zero = lines.put(f"{mark}.zero", "f32[]", "constant(0)")
        whole = lines.put(
            f"{mark}.pad",
            brackets([total + padding]),
            f"pad(%{whole}, %{zero}), padding=0_{padding}",
        )
    whole, at = do(lines, whole, total + padding), 0
    for (_, result, dims), size in zip(members, sizes, strict=True):
        cut = lines.put(
            f"{result}.cut", brackets([size]), f"slice(%{whole}), slice={{[{at}:{at + size}]}}"
        )
        lines.put(result, brackets(dims), f"reshape(%{cut})")
        at += size


def gradients(lines: Lines) -> None:
    """What is summed: g0, g1, g2."""
    for number, dims in enumerate(MEMBERS):
        lines.put(f"x{number}", brackets(dims), f"parameter({number})")
        lines.put(f"g{number}", brackets(dims), f"tanh(%x{number})")


def results(lines: Lines) -> None:
    for number, dims in enumerate(MEMBERS):
        lines.put(f"r{number}", brackets(dims), f"negate(%sum{number})")
    lines.put("out", f"({', '.join(map(brackets, MEMBERS))})", "tuple(%r0, %r1, %r2)")


def plain_sums(groups: Groups) -> str:
    lines = Lines()
    gradients(lines)
    for number, dims in enumerate(MEMBERS):
        lines.send(f"sum{number}", brackets(dims), "all-reduce", f"%g{number}", groups)
    results(lines)
    return module(lines)


def tuple_sums(groups: Groups) -> str:
    """All in one all-reduce of several arrays."""
    lines = Lines()
    gradients(lines)
    lines.send(
        "sums", f"({', '.join(map(brackets, MEMBERS))})", "all-reduce", "%g0, %g1, %g2", groups
    )
    for number, dims in enumerate(MEMBERS):
        lines.put(f"sum{number}", brackets(dims), f"get-tuple-element(%sums), index={number}")
    results(lines)
    return module(lines)


def shaped_sums(
    do: Phases, multiple: int = 4, buckets: Sequence[Sequence[int]] = ((0, 1, 2),)
) -> str:
    lines = Lines(11)
    gradients(lines)
    for mark, numbers in enumerate(buckets):
        bucket(
            lines,
            f"k{mark}",
            [(f"g{number}", f"sum{number}", MEMBERS[number]) for number in numbers],
            multiple,
            do,
        )
    results(lines)
    return module(lines)


def with_layouts(text: str) -> str:
    """Every array of one or two dimensions in row-major order, as XLA writes it."""
    for dims in MEMBERS:
        order = ",".join(map(str, reversed(range(len(dims)))))
        text = text.replace(f"{brackets(dims)} ", f"{brackets(dims)}{{{order}}} ")
    return text


def plain_gather(dims: Sequence[int], dim: int, groups: Groups) -> str:
    lines = Lines()
    lines.put("x", brackets(dims), "parameter(0)")
    lines.put("g", brackets(dims), "tanh(%x)")
    whole = [size * len(groups[0]) if at == dim else size for at, size in enumerate(dims)]
    lines.send("s", brackets(whole), "all-gather", "%g", groups, f", dimensions={{{dim}}}")
    lines.put("out", brackets(whole), "negate(%s)")
    return module(lines)


def shaped_gather(
    dims: Sequence[int], dim: int, levels: Sequence[Groups], order: Sequence[int] | None = None
) -> str:
    """First in the first of these groups; `order` says how the levels follow each other, outermost first."""
    lines = Lines(11)
    lines.put("x", brackets(dims), "parameter(0)")
    at, front = lines.put("g", brackets(dims), "tanh(%x)"), list[int]()
    for number, groups in enumerate(levels):
        at = lines.put(f"s.one{number}", brackets([1, *front, *dims]), f"reshape(%{at})")
        front.insert(0, len(groups[0]))
        shape = brackets([*front, *dims])
        at = lines.send(f"s.got{number}", shape, "all-gather", f"%{at}", groups, ", dimensions={0}")
    sizes, count = [*front, *dims], len(levels)
    wanted = [count - 1 - level for level in (order or range(count))]
    turned = [*range(count, count + dim), *wanted, *range(count + dim, len(sizes))]
    listed = ",".join(map(str, turned))
    lines.put(
        "s.turned",
        brackets([sizes[axis] for axis in turned]),
        f"transpose(%{at}), dimensions={{{listed}}}",
    )
    whole = [size * math.prod(front) if axis == dim else size for axis, size in enumerate(dims)]
    lines.put("s", brackets(whole), "reshape(%s.turned)")
    lines.put("out", brackets(whole), "negate(%s)")
    return module(lines)


TABLE = (0, 1, 2, 3, 4, 5, 6, 7)


def _offsets(lines: Lines, size: int, table: Sequence[int]) -> None:
    """%at: where the piece of the partition starts, and %no: 0."""
    listed = ", ".join(map(str, table))
    lines.put("table", f"u32[{len(table)}]", f"constant({{{listed}}})")
    lines.put("me", "u32[]", "partition-id()")
    lines.put("entry", "u32[1]", "dynamic-slice(%table, %me), dynamic_slice_sizes={1}")
    lines.put("low", "u32[1]", "constant({0})")
    lines.put("high", "u32[1]", f"constant({{{max(table)}}})")
    lines.put("within", "u32[1]", "clamp(%low, %entry, %high)")
    lines.put("signed", "s32[1]", "convert(%within)")
    lines.put("size", "s32[1]", f"constant({{{size}}})")
    lines.put("starts", "s32[1]", "multiply(%signed, %size)")
    lines.put("at", "s32[]", "reshape(%starts)")
    lines.put("no", "s32[]", "constant(0)")


def plain_scatter(
    dims: Sequence[int], dim: int, groups: Groups, table: Sequence[int] = TABLE
) -> str:
    """As XLA's partitioner writes it."""
    lines = Lines()
    lines.put("x", brackets(dims), "parameter(0)")
    lines.put("g", brackets(dims), "tanh(%x)")
    lines.send("sum", brackets(dims), "all-reduce", "%g", groups)
    size = dims[dim] // len(groups[0])
    _offsets(lines, size, table)
    piece = [size if at == dim else side for at, side in enumerate(dims)]
    starts = ", ".join("%at" if at == dim else "%no" for at in range(len(dims)))
    sizes = ",".join(map(str, piece))
    lines.put(
        "s", brackets(piece), f"dynamic-slice(%sum, {starts}), dynamic_slice_sizes={{{sizes}}}"
    )
    lines.put("out", brackets(piece), "negate(%s)")
    return module(lines)


def flat_scatter(dims: Sequence[int], dim: int, groups: Groups) -> str:
    lines = Lines()
    lines.put("x", brackets(dims), "parameter(0)")
    lines.put("g", brackets(dims), "tanh(%x)")
    piece = [size // len(groups[0]) if at == dim else size for at, size in enumerate(dims)]
    lines.send("s", brackets(piece), "reduce-scatter", "%g", groups, f", dimensions={{{dim}}}")
    lines.put("out", brackets(piece), "negate(%s)")
    return module(lines)


def shaped_scatter(dims: Sequence[int], dim: int, inner: Groups, outer: Groups) -> str:
    """Inside hosts, then across them."""
    lines, k, h = Lines(11), len(inner[0]), len(outer[0])
    piece = [size // (k * h) if at == dim else size for at, size in enumerate(dims)]
    lines.put("x", brackets(dims), "parameter(0)")
    lines.put("g", brackets(dims), "tanh(%x)")
    sizes = [*dims[:dim], h, k, piece[dim], *dims[dim + 1 :]]
    order = [dim + 1, dim, *range(dim), *range(dim + 2, len(sizes))]
    lines.put("s.split", brackets(sizes), "reshape(%g)")
    listed = ",".join(map(str, order))
    lines.put(
        "s.turned",
        brackets([sizes[axis] for axis in order]),
        f"transpose(%s.split), dimensions={{{listed}}}",
    )
    lines.send(
        "s.near", brackets([1, h, *piece]), "reduce-scatter", "%s.turned", inner, ", dimensions={0}"
    )
    lines.put("s.host", brackets([h, *piece]), "reshape(%s.near)")
    lines.send(
        "s.far", brackets([1, *piece]), "reduce-scatter", "%s.host", outer, ", dimensions={0}"
    )
    lines.put("s", brackets(piece), "reshape(%s.far)")
    lines.put("out", brackets(piece), "negate(%s)")
    return module(lines)


_CARRY = "(s32[], f32[6,8], f32[6,8])"


def loop_body(term: Callable[[Lines], str], count: int = 4) -> tuple[str, str]:
    """A body that adds a term of x to a carry, and a condition."""
    lines = Lines(31)
    lines.put("c", _CARRY, "parameter(0)")
    lines.put("i", "s32[]", "get-tuple-element(%c), index=0")
    lines.put("acc", "f32[6,8]", "get-tuple-element(%c), index=1")
    lines.put("v", "f32[6,8]", "get-tuple-element(%c), index=2")
    lines.put("step", "s32[]", "constant(1)")
    lines.put("next", "s32[]", "add(%i, %step)")
    lines.put("t", "f32[6,8]", "tanh(%v)")
    lines.put("more", "f32[6,8]", f"add(%acc, %{term(lines)})")
    lines.put("carried", _CARRY, "tuple(%next, %more, %v)")
    until = Lines()
    until.put("d", _CARRY, "parameter(0)")
    until.put("j", "s32[]", "get-tuple-element(%d), index=0")
    until.put("last", "s32[]", f"constant({count})")
    until.put("go", "pred[]", "compare(%j, %last), direction=LT")
    return lines.computation("body"), until.computation("until")


def loop(term: Callable[[Lines], str], behind: Callable[[Lines], str]) -> str:
    """Terms added up in a loop from zeros; `behind` makes of the loop's element %total what is read."""
    lines = Lines(51)
    lines.put("x", "f32[6,8]", "parameter(0)")
    lines.put("nil", "s32[]", "constant(0)")
    lines.put("zero", "f32[]", "constant(0)")
    lines.put("zeros", "f32[6,8]", "broadcast(%zero), dimensions={}")
    lines.put("start", _CARRY, "tuple(%nil, %zeros, %x)")
    lines.put("loop", _CARRY, "while(%start), condition=%until, body=%body")
    lines.put("total", "f32[6,8]", "get-tuple-element(%loop), index=1")
    lines.put("out", "f32[6,8]", f"negate(%{behind(lines)})")
    return module(lines, *loop_body(term))


def summed(
    operand: str, groups: Groups = ALL, dims: Sequence[int] = (6, 8)
) -> Callable[[Lines], str]:
    return lambda lines: lines.send(
        f"{operand}.sum", brackets(dims), "all-reduce", f"%{operand}", groups
    )


def in_phases(operand: str, do: Phases, dims: Sequence[int] = (6, 8)) -> Callable[[Lines], str]:
    def write(lines: Lines) -> str:
        bucket(lines, f"{operand}.k", [(operand, f"{operand}.sum", dims)], 8, do)
        return f"{operand}.sum"

    return write


def unchanged(operand: str) -> Callable[[Lines], str]:
    return lambda lines: operand
