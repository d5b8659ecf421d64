"""Refuses steps that cannot be divided, before anything runs and with the line."""

from __future__ import annotations

from collections.abc import Iterator

from memplan.errors import UnsupportedProgramError
from memplan.program import compat

_PLACING = "sets the sharding of arrays, which data_parallel decides for the whole step"
_PER_DEVICE = "is written for several devices already; data_parallel divides a step that is written for one"
_WITHOUT = "Leave it out of the step that data_parallel is given"

_REFUSED = {
    "sharding_constraint": (_PLACING, f"{_WITHOUT}; batch_argnums and split_state say what is divided."),
    "reshard": (_PLACING, f"{_WITHOUT}; batch_argnums and split_state say what is divided."),
    "mesh_cast": (_PLACING, f"{_WITHOUT}."),
    "layout_constraint": (_PLACING, f"{_WITHOUT}."),
    "jit": (_PLACING, "Leave in_shardings and out_shardings out of the jit inside the step."),
    "pjit": (_PLACING, "Leave in_shardings and out_shardings out of the jit inside the step."),
    "shard_map": (_PER_DEVICE, "Give data_parallel the function for one device, or jit this step without it."),
    "xla_pmap": (_PER_DEVICE, "Give data_parallel the function for one device, or jit this step without it."),
}
_PRINTS = ("debug_callback", "debug_print")


def refuse(jaxpr: compat.ClosedJaxpr) -> None:
    """Refuse a flat jaxpr that cannot be divided.

    Raises:
      UnsupportedProgramError: it places its arrays itself, is divided already, or has effects that would happen once
        for each device. Printing is allowed: the first device prints.
    """
    for eqn in _equations(jaxpr):
        name = eqn.primitive.name
        where = compat.relative(compat.source_of(eqn)) or "an unknown line"
        if name in _REFUSED:
            why, instead = _REFUSED[name]
            raise UnsupportedProgramError(f"{name} at {where} {why}. {instead}")
        if eqn.effects and (name not in _PRINTS or eqn.params.get("ordered")):
            raise UnsupportedProgramError(
                f"{name} at {where} has an effect outside of the step, ordered or with a result; every device of a "
                "divided step would repeat it. Do it outside of the step with what the step returns; jax.debug.print "
                "and jax.debug.callback with ordered=False may stay."
            )


def _equations(jaxpr: compat.ClosedJaxpr) -> Iterator[compat.JaxprEqn]:
    for eqn in jaxpr.jaxpr.eqns:
        called = compat.call_body(eqn)
        bodies = compat.control_bodies(eqn) if called is None else [called]
        for body in bodies:
            yield from _equations(body)
        if not bodies:
            yield eqn
