"""Reductions, cumulative ones, and sorting."""

from dataclasses import replace
from functools import partial

import jax.numpy as jnp

from memplan.program import compat
from memplan.program.ops.axes import Axes, Reduction, parallel, shape_of, without
from memplan.program.ops.record import Eqn, Primitive, greatest, least, register


def _reduced(eqn: Eqn, how: Reduction | None = None, of_booleans: bool = False) -> Axes:
    """Reduced axes, whose parts are combined by `how`; `of_booleans`: only for booleans."""
    axes, gone = without(eqn, eqn.params["axes"]), eqn.params["axes"]
    if how is None or (of_booleans and compat.aval_of(eqn.invars[0]).dtype != bool):
        return axes
    return Axes((tuple(range(len(shape_of(eqn.invars[0])))),), axes.results, dict.fromkeys(gone, how))


_reduction = partial(Primitive, "reduction")
register("reduce reduce_prod reduce_xor", _reduction())
register("argmax argmin", _reduction(axes=_reduced))
register("reduce_sum", _reduction(axes=partial(_reduced, how="sum")))
register("reduce_max", _reduction(axes=partial(_reduced, how="max")))
register("reduce_min", _reduction(axes=partial(_reduced, how="min")))
register("reduce_or", _reduction(axes=partial(_reduced, how="max", of_booleans=True)))
register("reduce_and", _reduction(axes=partial(_reduced, how="min", of_booleans=True)))


def _cumulative(eqn: Eqn) -> Axes:
    """Carried along its own dimension, from the first row on; complex numbers have no least value to begin with."""
    axis = eqn.params["axis"]
    if eqn.params["reverse"] or jnp.issubdtype(compat.aval_of(eqn.invars[0]).dtype, jnp.complexfloating):
        return parallel(eqn, [axis])
    return replace(parallel(eqn), carried=(axis,))


_running = partial(Primitive, axes=_cumulative)
register("cumsum", _running(accumulate=jnp.add))
register("cumprod", _running(accumulate=jnp.multiply, padding_value=lambda eqn, position, operands: 1))
register("cummax", _running(accumulate=jnp.maximum, padding_value=least))
register("cummin", _running(accumulate=jnp.minimum, padding_value=greatest))
register("cumlogsumexp", _running(accumulate=jnp.logaddexp, padding_value=least))
register("sort", Primitive(axes=lambda eqn: parallel(eqn, [eqn.params["dimension"]])))
register("top_k", Primitive(axes=lambda eqn: parallel(eqn, [eqn.params.get("axis", -1)])))
