"""Elementwise primitives."""

from collections.abc import Sequence
from functools import partial as with_facts

import jax.numpy as jnp

from memplan.program import compat
from memplan.program.ops.axes import Axes, parallel, shape_of
from memplan.program.ops.record import Eqn, Primitive, all_terms, register


def _product(eqn: Eqn, partial: Sequence[bool], whole: Sequence[bool]) -> bool:
    shape = shape_of(eqn.outvars[0])
    return sum(partial) == 1 and sum(whole) == 1 and shape_of(eqn.invars[partial.index(True)]) == shape


def _quotient(eqn: Eqn, partial: Sequence[bool], whole: Sequence[bool]) -> bool:
    """Integer division truncates, so it is not linear."""
    return jnp.issubdtype(compat.aval_of(eqn.outvars[0]).dtype, jnp.inexact) and partial[0] and all(whole[1:])


def _selection(eqn: Eqn, partial: Sequence[bool], whole: Sequence[bool]) -> bool:
    return whole[0] and all(partial[1:])


def _conversion(eqn: Eqn, partial: Sequence[bool], whole: Sequence[bool]) -> bool:
    """A conversion that rounds is not linear: a sum of terms rounded on each device is not the rounded sum."""
    before, after = (compat.aval_of(atom).dtype for atom in (eqn.invars[0], eqn.outvars[0]))
    floats = jnp.issubdtype(before, jnp.floating) and jnp.issubdtype(after, jnp.floating)
    return all(partial) and floats and jnp.promote_types(before, after) == after


def _undivided(eqn: Eqn) -> Axes:
    """The dimensions that are whole on every device."""
    return parallel(eqn, compat.divided_dims(eqn.params["sharding"], len(shape_of(eqn.outvars[0]))))


_pointwise = with_facts(Primitive, fusion="elementwise", axes=parallel)
register(
    "abs acos acosh and asin asinh atan atan2 atanh cbrt ceil clamp clz complex conj cosh eq erfc exp2 expm1 floor ge "
    "gt imag integer_pow is_finite le log1p log2 lt max min ne nextafter not one_minus_square or population_count real "
    "reduce_precision rem round rsqrt shift_left shift_right_arithmetic shift_right_logical sign sinh sqrt square tan "
    "xor",
    _pointwise(),
)
register("exp log", _pointwise(flops=8))
register("logistic", _pointwise(flops=10))
register("cos sin tanh", _pointwise(flops=12))
register("pow", _pointwise(flops=16))
register("erf erf_inv", _pointwise(flops=20))
register("digamma lgamma", _pointwise(flops=40))
register("add add_any neg sub", _pointwise(linear=all_terms))
register("mul", _pointwise(linear=_product))
register("div", _pointwise(linear=_quotient))
register("select_n", _pointwise(linear=_selection))
register("convert_element_type", _pointwise(linear=_conversion))
register("copy name", Primitive("view", axes=parallel, linear=all_terms))
register("sharding_constraint", Primitive("view", axes=_undivided, linear=all_terms))
register("bitcast_convert_type stop_gradient", Primitive("view", axes=parallel))
register("device_put igamma igammac polygamma zeta", Primitive(axes=parallel))
