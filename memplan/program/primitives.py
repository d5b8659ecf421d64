"""What each primitive costs and how the compiler treats it: tables, with a default for the rest.

A new primitive is a new entry.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from memplan.planning.graph import Fusion
from memplan.program import compat

# A reversal is no view, but XLA's pattern for the gradient of a convolution needs it beside the convolution.
_VIEWS = {"reshape", "squeeze", "expand_dims", "broadcast_in_dim", "iota", "bitcast_convert_type", "stop_gradient",
          "rev", "copy", "random_wrap", "random_unwrap", "name", "empty", "create_token"}  # fmt: skip

_REDUCTIONS = {"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor",
               "reduce", "argmax", "argmin", "squares_about_mean"}  # fmt: skip

_ELEMENTWISE = {
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil", "clamp",
    "clz", "complex", "concatenate", "conj", "convert_element_type", "cos", "cosh", "digamma", "div", "dynamic_slice",
    "dynamic_update_slice", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "gather", "ge", "gt",
    "imag", "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "log2", "logistic", "lt", "max", "min", "mul",
    "ne", "neg", "nextafter", "not", "one_minus_square", "or", "pad", "population_count", "pow", "random_bits",
    "random_fold_in", "random_seed", "random_split", "real", "reduce_precision", "rem", "round", "rsqrt",
    "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "slice", "split",
    "sqrt", "square", "sub", "tan", "tanh", "threefry2x32", "transpose", "xor",
}  # fmt: skip

_STEPS_PER_ELEMENT = {"threefry2x32": 100, "random_bits": 100, "erf": 20, "erf_inv": 20, "exp": 8, "log": 8, "tanh": 12,
                      "logistic": 10, "sin": 12, "cos": 12, "pow": 16, "lgamma": 40, "digamma": 40,
                      "squares_about_mean": 4}  # fmt: skip


def fusion_of(eqn: compat.JaxprEqn) -> Fusion:
    """How XLA treats the equation; whatever the tables do not know reads and writes memory."""
    name = eqn.primitive.name
    if name in _VIEWS:
        return "view"
    if name in _REDUCTIONS:
        return "reduction"
    return "elementwise" if name in _ELEMENTWISE else "kernel"


def is_along_rows(eqn: compat.JaxprEqn) -> bool:
    """A reduction along the last axis alone."""
    last = getattr(compat.aval_of(eqn.invars[0]), "ndim", 0) - 1 if eqn.invars else -1
    return fusion_of(eqn) == "reduction" and eqn.params.get("axes") == (last,)


def flops_of(eqn: compat.JaxprEqn) -> float:
    """Floating-point operations of one execution; loops count their trips, unknown trips count once."""
    rule = _FLOPS.get(eqn.primitive.name)
    if rule is not None:
        return rule(eqn)
    bodies = compat.sub_jaxprs(eqn)
    if bodies:
        return sum(flops_of_jaxpr(body) for body in bodies)
    if fusion_of(eqn) == "view":
        return 0.0
    return float(_STEPS_PER_ELEMENT.get(eqn.primitive.name, 1) * max(_largest(eqn.invars), _largest(eqn.outvars)))


def flops_of_jaxpr(jaxpr: Any) -> float:
    return sum(flops_of(eqn) for eqn in jaxpr.eqns)


def matrix_dtype(eqn: compat.JaxprEqn) -> str:
    """Operand type of the matrix work in the equation, or '' where there is none."""
    if eqn.primitive.name in ("dot_general", "conv_general_dilated"):
        return str(compat.aval_of(eqn.invars[0]).dtype)
    for body in compat.sub_jaxprs(eqn):
        for inner in body.eqns:
            found = matrix_dtype(inner)
            if found:
                return found
    return ""


def traffic_of(eqn: compat.JaxprEqn) -> int:
    """Bytes that the bodies of a loop move, over all trips, besides the equation's own inputs and outputs."""
    trips = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
    moved = 0
    for body in compat.sub_jaxprs(eqn):
        for inner in body.eqns:
            if fusion_of(inner) != "view":
                moved += sum(compat.nbytes_of(v.aval) for v in inner.outvars) * 2 + traffic_of(inner)
    return trips * moved


def is_recomputable(eqn: compat.JaxprEqn) -> bool:
    """May an equation run a second time with the same result and no other trace?"""
    if eqn.effects or eqn.primitive.name in _ONCE:
        return False
    return all(is_recomputable(inner) for body in compat.sub_jaxprs(eqn) for inner in body.eqns)


def _size(aval: Any) -> int:
    return math.prod(getattr(aval, "shape", ()))


def _largest(atoms: Any) -> int:
    return max((_size(atom.aval) for atom in atoms), default=0)


def _dot_flops(eqn: compat.JaxprEqn) -> float:
    (contracting, _), _ = eqn.params["dimension_numbers"]
    lhs = compat.aval_of(eqn.invars[0]).shape
    return 2.0 * _size(eqn.outvars[0].aval) * math.prod(lhs[axis] for axis in contracting)


def _conv_flops(eqn: compat.JaxprEqn) -> float:
    """Multiplications by the zeros of a dilated input are not counted: cuDNN skips them."""
    kernel = compat.aval_of(eqn.invars[1])
    features = kernel.shape[eqn.params["dimension_numbers"].rhs_spec[0]]
    dilation = math.prod(eqn.params["lhs_dilation"])
    return 2.0 * _size(eqn.outvars[0].aval) * _size(kernel) / features / dilation


def _scan_flops(eqn: compat.JaxprEqn) -> float:
    return eqn.params["length"] * sum(flops_of_jaxpr(body) for body in compat.sub_jaxprs(eqn))


def _cond_flops(eqn: compat.JaxprEqn) -> float:
    return max(flops_of_jaxpr(body) for body in compat.sub_jaxprs(eqn))


def _window_flops(eqn: compat.JaxprEqn) -> float:
    window = eqn.params.get("window_dimensions", ())
    return float(math.prod(window)) * _largest(eqn.outvars)


def _band_flops(eqn: compat.JaxprEqn) -> float:
    taps = compat.aval_of(eqn.invars[1]).shape[1] if len(eqn.invars) > 1 else 0
    return 2.0 * taps * _size(eqn.outvars[0].aval)


_FLOPS: dict[str, Callable[[compat.JaxprEqn], float]] = {
    "banded": _band_flops,
    "dot_general": _dot_flops,
    "conv_general_dilated": _conv_flops,
    "scan": _scan_flops,
    "cond": _cond_flops,
    "reduce_window_max": _window_flops,
    "reduce_window_sum": _window_flops,
    "select_and_scatter_add": _window_flops,
    "select_and_gather_add": _window_flops,
}


_ONCE = {
    "pure_callback": "it calls Python",
    "infeed": "it reads from outside the program",
    "outfeed": "it writes outside the program",
    "rng_uniform": "it draws from hidden state",
    "optimization_barrier": "it is a barrier that the step asks for",
    "custom_partitioning": "its partitioning is a black box",
}
