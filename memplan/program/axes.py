"""Which dimensions of an equation's operands and results are one: its axes, along which its work can be divided.

Dimensions on the same axis are divided together, among devices or in time; an axis that only operands have is summed
over (or reduced otherwise). A dimension on no axis cannot be divided. `axis_rules` says which there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from memplan.program import compat

Axis = int | None
Reduction = Literal["sum", "max", "min"]


@dataclass(frozen=True)
class Axes:
    """The axes of one equation.

    Attributes:
      operands, results: for each, the axis of every dimension.
      reduced: axis -> how it disappears, for those that no result has.
      masked: positions of operands to which the sum over an axis is added: they count once, not in every part.
    """

    operands: tuple[tuple[Axis, ...], ...]
    results: tuple[tuple[Axis, ...], ...]
    reduced: Mapping[int, Reduction] = field(default_factory=dict)
    masked: tuple[int, ...] = ()

    def of_operand(self, position: int, dim: int) -> Axis:
        return self.operands[position][dim]

    def dim_of(self, side: Sequence[Axis], axis: int) -> int | None:
        return side.index(axis) if axis in side else None

    def divisible(self, axis: int, eqn: compat.JaxprEqn, parts: int) -> bool:
        """Every dimension of the axis has a multiple of so many elements."""
        atoms = (*eqn.invars, *eqn.outvars)
        return all(
            compat.aval_of(atom).shape[dim] % parts == 0
            for atom, side in zip(atoms, (*self.operands, *self.results), strict=True)
            for dim, found in enumerate(side)
            if found == axis
        )


def local_params(eqn: compat.JaxprEqn, axes: Axes, axis: int, parts: int) -> dict[str, Any]:
    """The equation's parameters for one part, where the axis's dimensions are divided into so many."""
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
    sizes[dim] //= parts
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
