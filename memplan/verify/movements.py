"""Instructions that move, cut and sum what devices hold: their results as rows of segments, see `spreads`."""

import functools
import math
import re
from collections.abc import Callable, Iterable, Sequence

from memplan.hardware.machine import Groups
from memplan.verify.partition_offsets import PartitionOffsets
from memplan.verify.spreads import Operation, Spread, Spreads
from memplan.xla.collectives.groups import replica_groups
from memplan.xla.module import Instruction, Module
from memplan.xla.shapes import Array

COLLECTIVE = re.compile(
    r"^(?:all-(?:reduce|gather|to-all)|reduce-scatter|collective-\w+|ragged-all-to-all)(?:-start)?$"
)

_DIMENSIONS = re.compile(r"\bdimensions=\{([\d,]*)\}")
_SLICE = re.compile(r"\bslice=\{([^}]*)\}")
_RANGE = re.compile(r"\[(\d+):(\d+)(?::(\d+))?\]")
_PADDING = re.compile(r"\bpadding=(\d+)_(\d+)(?:, |$)")  # of one dimension, without gaps
_ZERO = re.compile(r"[{}\s,]*0(?:\.0*)?(?:[{}\s,]+0(?:\.0*)?)*[{}\s,]*")
_LAYOUT = re.compile(r"\{([\d,]+)\}")
_SPREADING = frozenset({"broadcast", "convert", "copy"})  # of zeros they make zeros


@functools.lru_cache(maxsize=1 << 12)
def is_row_major(array: Array) -> bool:
    if not array.layout or array.layout == "{}":
        return True
    found = _LAYOUT.fullmatch(array.layout)
    return found is not None and [int(one) for one in found[1].split(",")] == list(range(len(array.dims)))[::-1]


class Movements:
    """The instructions of one module that are looked through."""

    def __init__(self, module: Module, spreads: Spreads, wire: str | None) -> None:
        self._module, self._spreads, self._wire = module, spreads, wire
        self._offsets = PartitionOffsets(spreads)
        self._sent: dict[int, int] = {}  # values -> what they are on the way between hosts

    def of(
        self, op: Instruction, values: Sequence[int], shapes: Sequence[Array], stated: Callable[[bool], tuple[int, ...]]
    ) -> tuple[int, ...]:
        """The values of the result's leaves.

        Args:
          values: of the operands, arrays of these shapes.
          stated: gives the values of an instruction that is not looked through; not to be counted if it is part of a
            sum on its way.
        """
        made = self._moved(op, values, shapes)
        sent = self._moved_on_the_way(op, values, shapes)
        if sent is None:
            return stated(True) if made is None else made
        if all(self._spreads.spread(one).wire is None for one in sent):
            return sent
        result = stated(False) if made is None else made
        self._sent.update(zip(result, sent, strict=True))
        return result

    def is_zero(self, value: int) -> bool:
        key = self._spreads.keys[value]
        while isinstance(key, Operation) and key.opcode in _SPREADING:
            key = self._spreads.keys[key.operands[0][1][0]]
        return isinstance(key, Operation) and key.opcode == "constant" and bool(_ZERO.fullmatch(key.attributes))

    def _moved(self, op: Instruction, values: Sequence[int], shapes: Sequence[Array]) -> tuple[int, ...] | None:
        arrays = [*shapes, *op.result]
        if op.opcode in _PLACED:
            fits = all(is_row_major(one) for one in arrays)
        else:
            fits = op.opcode in _ELEMENTWISE and len({(one.dims, one.layout) for one in map(_plain, arrays)}) == 1
            fits = fits or (op.opcode == "all-reduce" and list(map(_plain, shapes)) == list(map(_plain, op.result)))
        if not fits or not all(one.size for one in arrays):
            return None
        made = (_PLACED | _ELEMENTWISE)[op.opcode](self, op, values, shapes)
        if made is None or {one.dtype for one in op.result} != {shapes[0].dtype}:
            return None
        return made if [self._spreads.sizes[value] for value in made] == [one.size for one in op.result] else None

    def _moved_on_the_way(
        self, op: Instruction, values: Sequence[int], shapes: Sequence[Array]
    ) -> tuple[int, ...] | None:
        """As `_moved`, of values that are sent in fewer bits, or are about to be."""
        sent = [self._sent.get(value, value) for value in values]
        if self._wire is None or (op.opcode != "convert" and sent == list(values)):
            return None
        if op.opcode == "convert":
            return self._converted(op, sent, shapes)
        if op.opcode == "bitcast-convert":
            return self._bits(op, sent, shapes)
        return self._moved(op, sent, shapes)

    # in fewer bits

    def _converted(self, op: Instruction, values: Sequence[int], shapes: Sequence[Array]) -> tuple[int, ...] | None:
        spread = self._spreads.spread(values[0])
        types = shapes[0].dtype, op.result[0].dtype
        if _plain(shapes[0]).layout != _plain(op.result[0]).layout or not shapes[0].size:
            return None
        if types == ("f32", self._wire):
            return self._one(self._spreads.narrowed(spread, types[1]))
        return self._one(self._spreads.widened(spread) if types == (self._wire, "f32") else None)

    def _bits(self, op: Instruction, values: Sequence[int], shapes: Sequence[Array]) -> tuple[int, ...] | None:
        """The bits of a number as an integer, or back."""
        given, made = _plain(shapes[0]), _plain(op.result[0])
        if {given.dtype, made.dtype} != {self._wire, f"u{given.bits}"} or (given.dims, given.layout) != (
            made.dims,
            made.layout,
        ):
            return None
        return self._one(self._spreads.relabelled(self._spreads.spread(values[0]), made.dtype))

    # on each device by itself

    def _same(self, op: Instruction, values: Sequence[int], shapes: Sequence[Array]) -> tuple[int, ...] | None:
        same = (op.result[0].dtype, op.result[0].size) == (shapes[0].dtype, shapes[0].size)
        return (values[0],) if same else None

    def _add(self, op: Instruction, values: Sequence[int], shapes: Sequence[Array]) -> tuple[int, ...] | None:
        if shapes[0].dtype == "pred" or all(map(self._spreads.is_source, values)):
            return None
        return self._one(self._spreads.added([self._spreads.spread(value) for value in values]))

    def _reduce(self, op: Instruction, values: Sequence[int], shapes: Sequence[Array]) -> tuple[int, ...] | None:
        """A sum over the first dimension."""
        if len(values) != 2 or _dimensions(op) != (0,) or not self._adds(op, shapes[0]):
            return None
        value, zero = values
        count = shapes[0].dims[0]
        if self._spreads.is_source(value) or count > self._spreads.partitions or not self.is_zero(zero):
            return None
        return self._one(self._spreads.added(self._equal_parts(value, count)))

    def _slice(self, op: Instruction, values: Sequence[int], shapes: Sequence[Array]) -> tuple[int, ...] | None:
        """Elements that lie side by side."""
        said = _SLICE.search(op.attributes)
        ranges = [(int(start), int(end), step or "1") for start, end, step in _RANGE.findall(said[1] if said else "")]
        dims = shapes[0].dims
        if len(ranges) != len(dims) or any(step != "1" for *_, step in ranges):
            return None
        cut = [dim for dim, (start, end, _) in enumerate(ranges) if end - start != dims[dim]]
        if cut and any(end - start != 1 for start, end, _ in ranges[: cut[-1]]):
            return None
        at = 0
        for (start, _, _), size in zip(ranges, dims, strict=True):
            at = at * size + start
        return self._one(self._spreads.piece(self._spreads.spread(values[0]), at, op.result[0].size))

    def _concatenate(self, op: Instruction, values: Sequence[int], shapes: Sequence[Array]) -> tuple[int, ...] | None:
        if _dimensions(op) != (0,):
            return None
        return self._one(self._spreads.joined([self._spreads.spread(value) for value in values]))

    def _pad(self, op: Instruction, values: Sequence[int], shapes: Sequence[Array]) -> tuple[int, ...] | None:
        found = _PADDING.search(op.attributes)
        if len(shapes[0].dims) != 1 or not found or not self.is_zero(values[1]):
            return None
        before, after = (self._spreads.zeros(int(count)) for count in found.groups())
        return self._one(self._spreads.joined([before, self._spreads.spread(values[0]), after]))

    def _transpose(self, op: Instruction, values: Sequence[int], shapes: Sequence[Array]) -> tuple[int, ...] | None:
        turned = self._spreads.transposed(self._spreads.spread(values[0]), shapes[0].dims, _dimensions(op))
        return None if turned is None else (turned,)

    def _dynamic_slice(self, op: Instruction, values: Sequence[int], shapes: Sequence[Array]) -> tuple[int, ...] | None:
        """A piece along one dimension, on each device the one of its number."""
        value, *starts = values
        dims, sizes = shapes[0].dims, op.result[0].dims
        cut = [dim for dim, size in enumerate(sizes) if size != dims[dim]]
        if self._spreads.is_source(value) or len(starts) != len(dims) or len(cut) != 1:
            return None
        (dim,) = cut
        table, size = self._offsets.table(starts[dim]), sizes[dim]
        if table is None or dims[dim] % size:
            return None
        begins = [max(0, min(start, dims[dim] - size)) for (start,) in table]
        if any(begin % size for begin in begins):
            return None
        places = [begin // size for begin in begins]
        return self._piece(self._spreads.spread(value), dims, dim, places, dims[dim] // size)

    # between devices

    def _all_reduce(self, op: Instruction, values: Sequence[int], shapes: Sequence[Array]) -> tuple[int, ...] | None:
        groups = self._groups(op)
        if groups is None or not all(self._adds(op, shape) for shape in shapes):
            return None
        return self._all(self._spreads.summed(self._spreads.spread(value), groups) for value in values)

    def _all_gather(self, op: Instruction, values: Sequence[int], shapes: Sequence[Array]) -> tuple[int, ...] | None:
        groups, dims = self._equal_groups(op), _dimensions(op)
        if groups is None or len(dims) != 1 or len(values) != len(op.result):
            return None
        (dim,), count = dims, len(groups[0])
        found: list[int] = []
        for value, given, made in zip(values, shapes, op.result, strict=True):
            spread = self._spreads.gathered(self._spreads.spread(value), groups)
            if spread is None or made.dims != _scaled(given.dims, dim, count):
                return None
            before = given.dims[:dim]
            order = (*range(1, dim + 1), 0, dim + 1)
            turned = self._spreads.transposed(spread, (count, *before, given.size // math.prod(before)), order)
            if turned is None:
                return None
            found.append(turned)
        return tuple(found)

    def _reduce_scatter(
        self, op: Instruction, values: Sequence[int], shapes: Sequence[Array]
    ) -> tuple[int, ...] | None:
        groups, dims = self._equal_groups(op), _dimensions(op)
        if groups is None or len(dims) != 1 or len(values) != 1 or not self._adds(op, shapes[0]):
            return None
        (dim,), count = dims, len(groups[0])
        summed = self._spreads.summed(self._spreads.spread(values[0]), groups)
        if summed is None or shapes[0].dims != _scaled(op.result[0].dims, dim, count):
            return None
        places = [0] * self._spreads.partitions
        for group in groups:
            for place, member in enumerate(group):
                places[member] = place
        return self._piece(summed, shapes[0].dims, dim, places, count)

    def _all_to_all(self, op: Instruction, values: Sequence[int], shapes: Sequence[Array]) -> tuple[int, ...] | None:
        groups = self._equal_groups(op)
        if groups is None:
            return None
        if not isinstance(op.shape, Array):
            exchanged = self._spreads.exchanged([self._spreads.spread(value) for value in values], groups)
            same = {one.dims for one in shapes} == {one.dims for one in op.result}
            return self._all(exchanged) if exchanged is not None and same else None
        if _dimensions(op) != (0,) or shapes[0].dims != op.shape.dims or shapes[0].dims[0] % len(groups[0]):
            return None
        exchanged = self._spreads.exchanged(self._equal_parts(values[0], len(groups[0])), groups)
        return None if exchanged is None else self._one(self._spreads.joined(exchanged))

    def _groups(self, op: Instruction) -> Groups | None:
        """The groups of a collective between partitions."""
        between = "channel_id=" in op.attributes and (
            op.opcode == "all-to-all" or "use_global_device_ids=true" in op.attributes
        )
        if not between:
            return None
        groups = tuple(sorted(replica_groups(op.attributes, self._spreads.partitions)))
        return groups if _covers(groups, self._spreads.partitions) else None

    def _equal_groups(self, op: Instruction) -> Groups | None:
        groups = self._groups(op)
        return groups if groups is not None and len({len(group) for group in groups}) == 1 else None

    def _adds(self, op: Instruction, array: Array) -> bool:
        """Is it a sum, in the type of its operand?"""
        body = self._module[op.attribute("to_apply").lstrip("%")]
        ends = [body.ops[name] for name in body.root.operands]
        sums = body.root.opcode == "add" and [end.opcode for end in ends] == ["parameter", "parameter"]
        types = {one.dtype for one in (*body.root.result, *(leaf for end in ends for leaf in end.result))}
        return sums and ends[0] != ends[1] and types == {array.dtype} and array.dtype != "pred"

    def _equal_parts(self, value: int, count: int) -> list[Spread]:
        spread, length = self._spreads.spread(value), self._spreads.sizes[value] // count
        return [self._spreads.piece(spread, place * length, length) for place in range(count)]

    def _piece(
        self, spread: Spread, dims: Sequence[int], dim: int, places: Sequence[int], count: int
    ) -> tuple[int, ...] | None:
        piece = self._spreads.piece_along(spread, dims, dim, places, count)
        return None if piece is None else (piece,)

    def _one(self, spread: Spread | None) -> tuple[int, ...] | None:
        return None if spread is None else (self._spreads.value(spread),)

    def _all(self, spreads: Iterable[Spread | None]) -> tuple[int, ...] | None:
        known = list(spreads)
        found = [self._spreads.value(spread) for spread in known if spread is not None]
        return tuple(found) if len(found) == len(known) else None


_Movement = Callable[[Movements, Instruction, Sequence[int], Sequence[Array]], tuple[int, ...] | None]
_ELEMENTWISE: dict[str, _Movement] = {"add": Movements._add, "all-reduce": Movements._all_reduce}
_PLACED: dict[str, _Movement] = {
    "reshape": Movements._same,
    "bitcast": Movements._same,
    "reduce": Movements._reduce,
    "slice": Movements._slice,
    "concatenate": Movements._concatenate,
    "pad": Movements._pad,
    "transpose": Movements._transpose,
    "dynamic-slice": Movements._dynamic_slice,
    "all-gather": Movements._all_gather,
    "reduce-scatter": Movements._reduce_scatter,
    "all-to-all": Movements._all_to_all,
}


@functools.lru_cache(maxsize=1 << 10)
def _covers(groups: Groups, partitions: int) -> bool:
    """Is each partition in one of the groups, and only once?"""
    return sorted(member for group in groups for member in group) == list(range(partitions))


def _plain(array: Array) -> Array:
    """A row-major array without its layout."""
    return Array(array.dtype, array.dims) if is_row_major(array) else array


def _dimensions(op: Instruction) -> tuple[int, ...]:
    found = _DIMENSIONS.search(op.attributes)
    return tuple(int(one) for one in found[1].split(",") if one) if found else ()


def _scaled(dims: Sequence[int], dim: int, count: int) -> tuple[int, ...]:
    return (*dims[:dim], dims[dim] * count, *dims[dim + 1 :])
