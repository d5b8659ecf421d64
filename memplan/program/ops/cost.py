"""The cost of an equation, by the records of its primitive and of the primitives in its bodies."""

from typing import Any

from memplan.program import compat
from memplan.program.ops.record import Eqn, Primitive, largest, of, register


def is_along_rows(eqn: Eqn) -> bool:
    """A reduction along the last axis alone."""
    last = getattr(compat.aval_of(eqn.invars[0]), "ndim", 0) - 1 if eqn.invars else -1
    return of(eqn).fusion == "reduction" and eqn.params.get("axes") == (last,)


def flops_of(eqn: Eqn) -> float:
    """Floating-point operations of one execution; loops count their trips, unknown trips count once."""
    record, bodies = of(eqn), compat.sub_jaxprs(eqn)
    if callable(record.flops):
        return record.flops(eqn)
    if bodies:
        return sum(map(flops_of_jaxpr, bodies))
    return 0.0 if record.fusion == "view" else float(record.flops * max(largest(eqn.invars), largest(eqn.outvars)))


def flops_of_jaxpr(jaxpr: Any) -> float:
    return sum(flops_of(eqn) for eqn in jaxpr.eqns)


def matrix_dtype(eqn: Eqn) -> str:
    """Operand type of the first matrix product in the equation, or '' where there is none."""
    if of(eqn).is_matrix_product:
        return str(compat.aval_of(eqn.invars[0]).dtype)
    inner = (matrix_dtype(one) for body in compat.sub_jaxprs(eqn) for one in body.eqns)
    return next(filter(None, inner), "")


def traffic_of(eqn: Eqn) -> int:
    """Bytes that the bodies of a loop move, over all trips, besides the equation's own inputs and outputs."""
    trips = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
    return trips * sum(
        2 * sum(compat.nbytes_of(var.aval) for var in inner.outvars) + traffic_of(inner)
        for body in compat.sub_jaxprs(eqn)
        for inner in body.eqns
        if of(inner).fusion != "view"
    )


def is_recomputable(eqn: Eqn) -> bool:
    """May an equation run a second time with the same result and no other effect?"""
    if eqn.effects or not of(eqn).recomputable:
        return False
    return all(is_recomputable(inner) for body in compat.sub_jaxprs(eqn) for inner in body.eqns)


register("scan", Primitive(flops=lambda eqn: eqn.params["length"] * sum(map(flops_of_jaxpr, compat.sub_jaxprs(eqn)))))
register("cond", Primitive(flops=lambda eqn: max(map(flops_of_jaxpr, compat.sub_jaxprs(eqn)))))
# calls of Python, reads and writes outside of the program, barriers that the step asks for, custom partitioning
register("pure_callback infeed outfeed optimization_barrier custom_partitioning", Primitive(recomputable=False))
