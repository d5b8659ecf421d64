"""Reductions, cumulative operations, and sorting."""

from dataclasses import replace
from functools import partial

import jax.numpy as jnp

from memplan.program import compat
from memplan.program.ops import library_calls
from memplan.program.ops.axes import Axes, Reduction, parallel, shape_of, without
from memplan.program.ops.record import Eqn, Primitive, greatest, least, register


def _reduced(eqn: Eqn, reduction: Reduction | None = None, of_booleans: bool = False) -> Axes:
    """Axes of a reduction.

    Args:
      reduction: how parts of a reduced axis are combined; None if it cannot be divided.
      of_booleans: the reduction holds only for booleans.
    """
    reduced_dims = eqn.params["axes"]
    axes = without(eqn, reduced_dims)
    if reduction is None or (of_booleans and compat.aval_of(eqn.invars[0]).dtype != bool):
        return axes
    operand = tuple(range(len(shape_of(eqn.invars[0]))))
    return Axes((operand,), axes.results, dict.fromkeys(reduced_dims, reduction))


_reduction = partial(Primitive, "reduction")
register("reduce reduce_prod reduce_xor", _reduction())
register("argmax argmin", _reduction(axes=_reduced))
register("reduce_sum", _reduction(axes=partial(_reduced, reduction="sum")))
register("reduce_max", _reduction(axes=partial(_reduced, reduction="max")))
register("reduce_min", _reduction(axes=partial(_reduced, reduction="min")))
register("reduce_or", _reduction(axes=partial(_reduced, reduction="max", of_booleans=True)))
register("reduce_and", _reduction(axes=partial(_reduced, reduction="min", of_booleans=True)))


def _cumulative(eqn: Eqn) -> Axes:
    """Carried along its own dimension, from the first row on.

    A reversed one cannot be divided, nor one of complex numbers, which have no least value to begin
    with.
    """
    axis = eqn.params["axis"]
    dtype = compat.aval_of(eqn.invars[0]).dtype
    if eqn.params["reverse"] or jnp.issubdtype(dtype, jnp.complexfloating):
        return parallel(eqn, [axis])
    return replace(parallel(eqn), carried=(axis,))


_running = partial(Primitive, axes=_cumulative)
register("cumsum", _running(accumulate=jnp.add))
register(
    "cumprod",
    _running(accumulate=jnp.multiply, padding_value=lambda eqn, position, operands: 1),
)
register("cummax", _running(accumulate=jnp.maximum, padding_value=least))
register("cummin", _running(accumulate=jnp.minimum, padding_value=greatest))
register("cumlogsumexp", _running(accumulate=jnp.logaddexp, padding_value=least))
register(
    "sort",
    Primitive(
        axes=lambda eqn: parallel(eqn, [eqn.params["dimension"]]), library_calls=library_calls.sort
    ),
)
register(
    "top_k",
    Primitive(
        axes=lambda eqn: parallel(eqn, [eqn.params.get("axis", -1)]),
        library_calls=library_calls.top_k,
    ),
)
