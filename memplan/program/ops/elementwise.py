"""Elementwise primitives."""

from functools import partial as with_facts

from memplan.program import compat
from memplan.program.ops.axes import Axes, parallel, shape_of
from memplan.program.ops.record import Eqn, Primitive, register


def _undivided(eqn: Eqn) -> Axes:
    """The dimensions that every device has whole."""
    return parallel(eqn, compat.divided_dims(eqn.params["sharding"], len(shape_of(eqn.outvars[0]))))


_pointwise = with_facts(Primitive, fusion="elementwise", axes=parallel)
register(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp clz complex "
    "conj convert_element_type cosh div eq erfc exp2 expm1 floor ge gt imag integer_pow "
    "is_finite le log1p log2 lt max min mul ne neg nextafter not one_minus_square or "
    "population_count real reduce_precision rem round rsqrt select_n shift_left "
    "shift_right_arithmetic shift_right_logical sign sinh sqrt square sub tan xor",
    _pointwise(),
)
register("exp log", _pointwise(flops=8))
register("logistic", _pointwise(flops=10))
register("cos sin tanh", _pointwise(flops=12))
register("pow", _pointwise(flops=16))
register("erf erf_inv", _pointwise(flops=20))
register("digamma lgamma", _pointwise(flops=40))
register("sharding_constraint", Primitive("view", axes=_undivided))
register(
    "bitcast_convert_type copy layout_constraint name pvary stop_gradient",
    Primitive("view", axes=parallel),
)
register("device_put igamma igammac polygamma zeta", Primitive(axes=parallel))
