"""The cost of an equation, by the records of its primitive and of the primitives in its bodies."""

from collections.abc import Iterator
from typing import Any

from memplan.hardware.efficiency import PRODUCT, MatrixShape
from memplan.hardware.library_calls import LibraryCall
from memplan.program import compat
from memplan.program.ops.record import Eqn, Primitive, largest, of, register


def is_along_rows(eqn: Eqn) -> bool:
    """Is the equation a reduction along the last axis alone?"""
    last = getattr(compat.aval_of(eqn.invars[0]), "ndim", 0) - 1 if eqn.invars else -1
    return of(eqn).fusion == "reduction" and eqn.params.get("axes") == (last,)


def flops_of(eqn: Eqn) -> float:
    """Floating-point operations of one execution; a loop of unknown length counts one trip."""
    record, bodies = of(eqn), compat.sub_jaxprs(eqn)
    if callable(record.flops):
        return record.flops(eqn)
    if bodies:
        return sum(map(flops_of_jaxpr, bodies))
    if record.fusion == "view":
        return 0.0
    return float(record.flops * max(largest(eqn.invars), largest(eqn.outvars)))


def flops_of_jaxpr(jaxpr: Any) -> float:
    """Floating-point operations of a jaxpr."""
    return sum(flops_of(eqn) for eqn in jaxpr.eqns)


def matrix_dtype(eqn: Eqn) -> str:
    """Operand type of the first matrix product in the equation, or '' where there is none."""
    if of(eqn).matrix_shape is not None:
        return str(compat.aval_of(eqn.invars[0]).dtype)
    return next(filter(None, map(matrix_dtype, _inner(eqn))), "")


def matrix_shape(eqn: Eqn) -> MatrixShape:
    """Shape of the first matrix product in the equation."""
    shape = of(eqn).matrix_shape
    if shape is not None:
        return shape(eqn)
    return next(map(matrix_shape, filter(matrix_dtype, _inner(eqn))), PRODUCT)


def library_calls_of(eqn: Eqn) -> tuple[LibraryCall, ...]:
    """Calls of libraries' routines; those of a loop's body in all its trips, of all branches."""
    trips = _trips(eqn)
    calls = (call.times(trips) for inner in _inner(eqn) for call in library_calls_of(inner))
    return (*of(eqn).library_calls(eqn), *calls)


def traffic_of(eqn: Eqn) -> int:
    """Bytes that a loop's body moves in all trips, besides the equation's inputs and outputs."""
    return _trips(eqn) * sum(
        2 * sum(compat.nbytes_of(var.aval) for var in inner.outvars) + traffic_of(inner)
        for inner in _inner(eqn)
        if of(inner).fusion != "view"
    )


def _trips(eqn: Eqn) -> int:
    """How often it runs its bodies; 1 if that is unknown."""
    return eqn.params["length"] if eqn.primitive.name == "scan" else 1


def _inner(eqn: Eqn) -> Iterator[Eqn]:
    """The equations of its bodies."""
    return (inner for body in compat.sub_jaxprs(eqn) for inner in body.eqns)


def is_recomputable(eqn: Eqn) -> bool:
    """May an equation run a second time with the same result and no other effect?"""
    if eqn.effects or not of(eqn).recomputable:
        return False
    return all(map(is_recomputable, _inner(eqn)))


def _scan_flops(eqn: Eqn) -> float:
    return eqn.params["length"] * sum(map(flops_of_jaxpr, compat.sub_jaxprs(eqn)))


def _cond_flops(eqn: Eqn) -> float:
    return max(map(flops_of_jaxpr, compat.sub_jaxprs(eqn)))


register("scan", Primitive(flops=_scan_flops))
register("cond", Primitive(flops=_cond_flops))
# calls of Python, reads and writes outside of the program, barriers of the step, custom
# partitioning
register(
    "pure_callback infeed outfeed optimization_barrier custom_partitioning",
    Primitive(recomputable=False),
)
