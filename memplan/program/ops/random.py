"""Random numbers and keys."""

from functools import partial as with_facts
from typing import Any

from memplan.program import compat
from memplan.program.ops.axes import Axes, Axis, shape_of
from memplan.program.ops.record import Eqn, Primitive, of_result, register


def _keywise(eqn: Eqn) -> Axes | None:
    """Axes of arrays of keys, along the dimensions that all arrays have.

    Each key of threefry draws independently. With other generators, one key of a batch draws for
    all.
    """
    if not all(map(compat.draws_by_itself, (*eqn.invars, *eqn.outvars))):
        return None
    rank = min(len(shape_of(atom)) for atom in (*eqn.invars, *eqn.outvars))
    names = tuple(range(rank))

    def side(atom: Any) -> tuple[Axis, ...]:
        return (*names, *(None,) * (len(shape_of(atom)) - rank))

    return Axes(tuple(map(side, eqn.invars)), tuple(map(side, eqn.outvars)))


def _has_keys(eqn: Eqn) -> bool:
    """Has the equation several keys?

    A single key draws its bits by element number: a part continues the count of the previous part.
    """
    return bool(shape_of(eqn.invars[0]))


def _bits(eqn: Eqn) -> Axes | None:
    """Along the dimensions of the keys or, for a single key, the first dimension of its bits."""
    if _has_keys(eqn):
        return _keywise(eqn)
    rank = len(shape_of(eqn.outvars[0]))
    bits: tuple[Axis, ...] = (0, *(None,) * (rank - 1)) if rank else ()
    return Axes(((),), (bits,))


def _bits_size(eqn: Eqn, axes: Axes, axis: int) -> int | None:
    """The index of an axis in the shape parameter, which is the shape of one key's bits."""
    dim = of_result(eqn, axes, axis)
    key_dims = len(axes.operands[0])
    return None if dim is None or dim < key_dims else dim - key_dims


_drawn = with_facts(Primitive, "elementwise")
register(
    "random_bits",
    _drawn(
        moves_elements=True,
        flops=100,
        axes=_bits,
        sizes=("shape", _bits_size),
        can_run_rows=_has_keys,
    ),
)
register("random_fold_in random_seed random_split", _drawn(moves_elements=True, axes=_keywise))
register("threefry2x32", _drawn(flops=100))
register("random_unwrap random_wrap", Primitive("view", axes=_keywise))
register("random_clone", Primitive(axes=_keywise))
register("rng_uniform", Primitive(recomputable=False))  # hidden state
