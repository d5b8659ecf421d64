"""Where every value of a step lies when it spans several devices: asked of XLA, which propagates shardings itself."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.sharding import Sharding

from memplan.program import compat


def spans_devices(tree: Any) -> bool:
    """Is any array, shape or sharding in this tree laid out over more than one device?"""
    return any(_is_wide(getattr(leaf, "sharding", leaf)) for leaf in jax.tree.leaves(tree))


def places_of_its_own(eqns: Iterable[compat.JaxprEqn]) -> bool:
    """Does any equation name several devices itself (a sharding constraint, `shard_map`)?"""
    return any(
        spans_devices(param) or getattr(param, "size", 1) > 1
        for eqn in eqns
        for name, param in eqn.params.items()
        if name in ("mesh", "sharding", "in_shardings", "out_shardings")
    )


def placements(traced: Any, flat: compat.ClosedJaxpr) -> dict[compat.Var, Sharding]:
    """The sharding of every variable of the flat jaxpr, by two compilations for the local devices.

    The first, of the step itself, says where its arguments and outputs go; the second returns every intermediate.
    """
    unmodified = traced.lower().compile()
    given = _positional(unmodified.input_shardings, flat.jaxpr.invars)
    made = [var for eqn in flat.jaxpr.eqns for var in eqn.outvars if _has_buffer(var)]
    spread = jax.jit(functools.partial(_every_value, flat), in_shardings=given, keep_unused=True)
    types = [compat.as_struct(v.aval) for v in flat.jaxpr.invars]
    found = dict(zip(flat.jaxpr.invars, given, strict=True))
    found.update(zip(made, spread.lower(*types).compile().output_shardings, strict=True))
    returned = jax.tree.leaves(unmodified.output_shardings)
    found.update(
        (atom, sharding)
        for atom, sharding in zip(flat.jaxpr.outvars, returned, strict=True)
        if isinstance(atom, compat.Var) and atom not in flat.jaxpr.invars
    )
    return found


def share(aval: Any, sharding: Sharding | None) -> float:
    """The part of a value that one device holds."""
    shape = getattr(aval, "shape", ())
    if sharding is None or not math.prod(shape):
        return 1.0
    return math.prod(sharding.shard_shape(shape)) / math.prod(shape)


def _is_wide(sharding: Any) -> bool:
    return isinstance(sharding, Sharding) and sharding.num_devices > 1


def _has_buffer(var: compat.Var) -> bool:
    aval = compat.aval_of(var)
    return hasattr(aval, "shape") and aval.dtype != jax.dtypes.float0 and not isinstance(var, compat.DropVar)


def _positional(shardings: Any, invars: Sequence[compat.Var]) -> list[Any]:
    """jax's pair (positional, by keyword), flat; None where the compiler dropped an argument that is not read."""
    leaves = jax.tree.leaves(shardings, is_leaf=lambda leaf: leaf is None)
    assert len(leaves) == len(invars)
    return leaves


def _every_value(flat: compat.ClosedJaxpr, *operands: Any) -> list[Any]:
    env: dict[Any, Any] = dict(compat.consts_of(flat))
    env.update(zip(flat.jaxpr.invars, operands, strict=True))
    for eqn in flat.jaxpr.eqns:
        values = [compat.read(env, atom) for atom in eqn.invars]
        with compat.as_written(eqn):
            env.update(zip(eqn.outvars, compat.bind(eqn, values), strict=True))
    return [env[var] for eqn in flat.jaxpr.eqns for var in eqn.outvars if _has_buffer(var)]
