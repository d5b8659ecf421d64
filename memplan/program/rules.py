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

COLLECTIVES = {"psum", "pmax", "pmin", "reduce_scatter", "all_gather", "all_to_all", "ppermute"}

_REDUCTIONS = {"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor",
               "reduce", "argmax", "argmin"}  # fmt: skip

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
                      "logistic": 10, "sin": 12, "cos": 12, "pow": 16, "lgamma": 40, "digamma": 40}  # fmt: skip


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


def is_plain(eqn: compat.JaxprEqn) -> bool:
    """True for an equation that its printed form describes in full: two that print alike compile alike."""
    if eqn.effects or compat.sub_jaxprs(eqn):
        return False
    return fusion_of(eqn) != "kernel" or eqn.primitive.name in _FLOPS


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


def workspace_of(eqn: compat.JaxprEqn) -> int:
    """Device bytes that an equation needs while it runs, besides its inputs and outputs."""
    rule = _WORKSPACE.get(eqn.primitive.name)
    if rule is not None:
        return rule(eqn)
    return max((live_peak(body) for body in compat.sub_jaxprs(eqn)), default=0)


def traffic_of(eqn: compat.JaxprEqn) -> int:
    """Bytes that the bodies of a loop move, over all trips, besides the equation's own inputs and outputs."""
    trips = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
    moved = 0
    for body in compat.sub_jaxprs(eqn):
        for inner in body.eqns:
            if fusion_of(inner) != "view":
                moved += sum(compat.nbytes_of(v.aval) for v in inner.outvars) * 2 + traffic_of(inner)
    return trips * moved


def why_not_recomputable(eqn: compat.JaxprEqn) -> str:
    """The reason why an equation may run only once, or ''."""
    if eqn.effects:
        return f"it has effects ({', '.join(sorted(str(effect) for effect in eqn.effects))})"
    reason = _ONCE.get(eqn.primitive.name, "")
    inside = (why_not_recomputable(inner) for body in compat.sub_jaxprs(eqn) for inner in body.eqns)
    return reason or next((f"inside it: {why}" for why in inside if why), "")


def live_peak(jaxpr: Any) -> int:
    """Largest sum of live intermediate bytes of a body in its own order; views and broadcasts cost nothing."""
    last: dict[Any, int] = {}
    for position, eqn in enumerate(jaxpr.eqns):
        for atom in eqn.invars:
            if not isinstance(atom, compat.Literal):
                last[atom] = position
    ending: dict[int, list[Any]] = {}
    live = peak = 0
    made: set[Any] = set()
    for position, eqn in enumerate(jaxpr.eqns):
        if fusion_of(eqn) != "view":
            for var in eqn.outvars:
                live += compat.nbytes_of(var.aval)
                made.add(var)
                ending.setdefault(last.get(var, position), []).append(var)
        peak = max(peak, live + workspace_of(eqn))
        live -= sum(compat.nbytes_of(var.aval) for var in ending.get(position, ()) if var in made)
    return peak


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


_FLOPS: dict[str, Callable[[compat.JaxprEqn], float]] = {
    "dot_general": _dot_flops,
    "conv_general_dilated": _conv_flops,
    "scan": _scan_flops,
    "cond": _cond_flops,
    "reduce_window_max": _window_flops,
    "reduce_window_sum": _window_flops,
    "select_and_scatter_add": _window_flops,
    "select_and_gather_add": _window_flops,
}


def _winners(eqn: compat.JaxprEqn) -> int:
    """XLA:GPU first finds each window's winner: its value, in at least 32 bits, and one s32 index per axis.

    They stand beside the operand, then beside the result; whichever of these two is not there gives its bytes.
    """
    source, operand = (compat.aval_of(atom) for atom in eqn.invars)
    winners = _size(source) * (max(4, source.dtype.itemsize) + 4 * len(source.shape))
    return max(0, winners - compat.nbytes_of(operand))


def _padded_input(eqn: compat.JaxprEqn) -> int:
    """cuDNN pads both ends of an axis alike: XLA:GPU copies an input whose padding is not, with the difference added.

    The copy stands beside the input, then beside the result.
    """
    lhs = compat.aval_of(eqn.invars[0])
    extra = [abs(high - low) for low, high in eqn.params["padding"]]
    if not any(extra) or max(eqn.params["lhs_dilation"]) > 1:
        return 0
    spatial = eqn.params["dimension_numbers"].lhs_spec[2:]
    shape = list(lhs.shape)
    for axis, more in zip(spatial, extra, strict=True):
        shape[axis] += more
    copy = math.prod(shape) * lhs.dtype.itemsize
    return max(0, copy - min(compat.nbytes_of(lhs), compat.nbytes_of(compat.aval_of(eqn.outvars[0]))))


_WORKSPACE: dict[str, Callable[[compat.JaxprEqn], int]] = {
    "select_and_scatter_add": _winners,
    "conv_general_dilated": _padded_input,
}

_ONCE = {
    "pure_callback": "it calls Python",
    "infeed": "it reads from outside the program",
    "outfeed": "it writes outside the program",
    "rng_uniform": "it draws from hidden state",
    "optimization_barrier": "it is a barrier that the step asks for",
    "custom_partitioning": "its partitioning is a black box",
}
