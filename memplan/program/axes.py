"""Which dimensions of an equation's operands and results are one: its axes, along which its work can be divided.

Dimensions on the same axis are divided together, among devices or in time; an axis that only operands have is summed
over (or reduced otherwise). A dimension on no axis cannot be divided. Along an axis, rows of a result may read other
rows of an operand than their own: `Rows` says which. `axis_rules` says which axes there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from memplan.planning.graph import ALIGNED, Rows
from memplan.program import compat

Axis = int | None
Reduction = Literal["sum", "max", "min", "moments"]
"""How parts are put together; of moments each part has more than its result (`moments.Moments`)."""


@dataclass(frozen=True)
class Axes:
    """The axes of one equation."""

    # operands, results: for each, the axis of every dimension
    operands: tuple[tuple[Axis, ...], ...]
    results: tuple[tuple[Axis, ...], ...]
    # axis -> how it disappears, for those that no result has
    reduced: Mapping[int, Reduction] = field(default_factory=dict)
    # positions of operands to which the sum over an axis is added: they count once, not in every part
    masked: tuple[int, ...] = ()
    # (position of an operand, axis) -> the rows that a result's rows read, where they are not the same ones; of a
    # reduced axis, the rows that go with those of the last operand
    rows: Mapping[tuple[int, int], Rows] = field(default_factory=dict)
    # axes along which a row of the result is one of an operand and the row of the result before it
    carried: tuple[int, ...] = ()

    def of_operand(self, position: int, dim: int) -> Axis:
        return self.operands[position][dim]

    def dim_of(self, side: Sequence[Axis], axis: int) -> int | None:
        return side.index(axis) if axis in side else None

    def rows_of(self, position: int, axis: int) -> Rows:
        """The rows of an operand on the axis that a result's rows read."""
        return self.rows.get((position, axis), ALIGNED)

    def last_on(self, axis: int) -> int:
        """The position of the last operand on the axis, by whose rows an equation counts that reduces it."""
        return max(position for position, side in enumerate(self.operands) if axis in side)

    def counted(self, axis: int, eqn: compat.JaxprEqn) -> int:
        """How many rows the axis has: of the result, or where it is reduced of the last operand on it."""
        if axis in self.reduced:
            sides = zip(reversed(self.operands), reversed(eqn.invars), strict=True)
        else:
            sides = zip(self.results, eqn.outvars, strict=True)
        return next(shape_of(atom)[side.index(axis)] for side, atom in sides if axis in side)

    def leave(self, position: int, axis: int, eqn: compat.JaxprEqn) -> bool:
        """Rows of the result that exist read some of an operand that do not."""
        given = shape_of(eqn.invars[position])[self.operands[position].index(axis)]
        return self.rows_of(position, axis).leave(self.counted(axis, eqn), given)

    def divisible(self, axis: int, eqn: compat.JaxprEqn, parts: int) -> bool:
        """Every dimension of the axis has a multiple of so many elements, and parts read rows of their own alone."""
        if axis in self.carried or self.reduced.get(axis) == "moments":  # parts want more of others than their results
            return False
        atoms = (*eqn.invars, *eqn.outvars)
        return all(
            shape_of(atom)[dim] % parts == 0
            for atom, side in zip(atoms, (*self.operands, *self.results), strict=True)
            for dim, found in enumerate(side)
            if found == axis
        ) and all(self._apart(position, axis, eqn, parts) for position, along in self.rows if along == axis)

    def _apart(self, position: int, axis: int, eqn: compat.JaxprEqn, parts: int) -> bool:
        given = shape_of(eqn.invars[position])[self.operands[position].index(axis)]
        return self.rows_of(position, axis).apart(self.counted(axis, eqn), given, parts)


def local_params(eqn: compat.JaxprEqn, axes: Axes, axis: int, resized: Callable[[int], int]) -> dict[str, Any]:
    """The equation's parameters for one part, where the axis's dimensions have other sizes."""
    params = dict(eqn.params)
    known = _SIZES.get(eqn.primitive.name)
    if known is None:
        return params
    name, of_operand = known
    side = axes.operands[0] if of_operand else axes.results[0]
    dim, sizes = axes.dim_of(side, axis), list(params[name])
    if dim is not None and eqn.primitive.name == "random_bits":
        dim -= len(axes.operands[0])  # its shape is that of one key's draw
    if dim is None or dim < 0 or (eqn.primitive.name == "gather" and dim in _batched(eqn)):
        return params
    sizes[dim] = resized(sizes[dim])
    return {**params, name: tuple(sizes)}


def _batched(gather: compat.JaxprEqn) -> tuple[int, ...]:
    """Dimensions of its operand of which every slice has one element, the one of its index."""
    return gather.params["dimension_numbers"].operand_batching_dims


# Parameters that hold sizes, by dimension of the first operand (True) or of the first result.
_SIZES = {
    "broadcast_in_dim": ("shape", False),
    "iota": ("shape", False),
    "reshape": ("new_sizes", False),
    "slice": ("limit_indices", True),
    "dynamic_slice": ("slice_sizes", True),
    "gather": ("slice_sizes", True),
    "random_bits": ("shape", False),
    "empty": ("shape", False),
}


def shape_of(atom: Any) -> tuple[int, ...]:
    return tuple(compat.aval_of(atom).shape)
