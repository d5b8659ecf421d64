"""Values that cross a boundary and that memplan leaves as the user wrote them, with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from memplan.errors import UnsupportedProgramError
from memplan.planning.loops import Residuals, recomputed_ops
from memplan.program import compat
from memplan.program.flat import Flat
from memplan.program.loops.joint import Joint
from memplan.program.loops.pairs import Pair, last_chained, loop_of, pairs
from memplan.program.trace import Program
from memplan.units import located

_REGIONS = frozenset(("scan", "cond", "shard_map"))
_TRANSPOSED = "transpose("  # jax's scope of what a pullback computes


@dataclass(frozen=True)
class Unplanned:
    """Values that an equation with bodies makes for later ones, and that stay as they are.

    Attributes:
      kind: the equation's primitive.
      source: its `file:line`, or ''.
      nbytes: of the values, of all trips of the loops around.
      reason: why they stay.
      may_checkpoint: `jax.checkpoint` around the body would compute them again.
    """

    kind: str
    source: str
    nbytes: int
    reason: str
    may_checkpoint: bool


def unplanned(program: Program) -> list[Unplanned]:
    """What stays as the user wrote it, the largest first; nothing for a step that cannot be read.

    Values of one equation that stay for one reason are one row.
    """
    if not _has_regions(program.traced.jaxpr.jaxpr):
        return []
    try:
        rows = list(_of(program.flat, 1))
    except UnsupportedProgramError:
        return []
    sums = dict[Unplanned, int]()
    for row in rows:
        key = Unplanned(row.kind, row.source, 0, row.reason, row.may_checkpoint)
        sums[key] = sums.get(key, 0) + row.nbytes
    merged = (
        Unplanned(key.kind, key.source, nbytes, key.reason, key.may_checkpoint)
        for key, nbytes in sums.items()
    )
    return sorted(merged, key=lambda row: -row.nbytes)


def _has_regions(jaxpr: Any) -> bool:
    """Does a jaxpr, or one inside, have an equation of such a kind?"""
    inner = [sub for eqn in jaxpr.eqns for sub in compat.sub_jaxprs(eqn)]
    kinds = (eqn.primitive.name for eqn in jaxpr.eqns)
    return not _REGIONS.isdisjoint(kinds) or any(map(_has_regions, dict.fromkeys(inner)))


def _of(flat: Flat, trips: int, end: int | None = None) -> Iterator[Unplanned]:
    """The values of a flat jaxpr.

    Args:
      trips: how many of each exist at once.
      end: the number of the first equation that is in another body.
    """
    count = len(flat.eqns) if end is None else end
    every = [*_chained(flat), *pairs(flat)]
    planned = {(pair.forward, result) for pair in every for result in pair.residuals}
    for number in range(count):
        eqn = flat.eqns[number]
        if eqn.primitive.name in _REGIONS:
            for position in range(len(eqn.outvars)):
                if (number, position) not in planned:
                    yield from _result(flat, number, position, trips)
    of_forward = {pair.forward: pair for pair in every}
    backwards = {number for pair in every for number in pair.backwards}
    for number in range(count):
        pair = of_forward.get(number)
        for index, inner in enumerate(compat.bodies_of(flat.eqns[number])):
            with compat.inside(flat.eqns[number]):
                if pair is not None:
                    rows = list(_fixed(pair, index, trips))
                    joint = Joint.of(pair, index)
                    rows += _of(joint.flat, trips * inner.trips, joint.ends[0])
                elif number not in backwards:
                    rows = list(_of(flat.inner(number, index), trips))
                else:
                    rows = []
            yield from rows


def _chained(flat: Flat) -> Iterator[Pair]:
    """The pairs whose forward equations are backward equations of others."""
    end = len(flat.eqns)
    while (pair := last_chained(flat, end)) is not None:
        yield pair
        end = pair.forward


def _result(flat: Flat, number: int, position: int, trips: int) -> Iterator[Unplanned]:
    """A result of an equation that a gradient reads in the bodies of equations that are no pair."""
    eqn = flat.eqns[number]
    var = eqn.outvars[position]
    scan = compat.scan_of(eqn)
    is_carried = scan is not None and position < scan.carries
    readers = sorted(flat.readers.get(var, ()))
    gradients = [reader for reader in readers if _has_gradient(flat.eqns[reader])]
    if is_carried or var in flat.returned or not gradients:
        return
    others = [reader for reader in readers if reader not in gradients]
    if others:
        reason = f"{_name(flat, others[0])} reads them, too"
    else:
        reason = f"{_name(flat, gradients[0])} reads them, which runs other bodies"
    nbytes = trips * compat.nbytes_of(var.aval)
    yield Unplanned(eqn.primitive.name, _source(eqn), nbytes, reason, not others)


def _fixed(pair: Pair, index: int, trips: int) -> Iterator[Unplanned]:
    """Residuals of a pair that its backward equations cannot compute again."""
    loop = loop_of(pair, index, 1, ())
    body = loop.body
    eqns = pair.flat.inner(pair.forward, index).eqns
    ops = recomputed_ops(loop, Residuals(()))
    read = loop.needed.union(*(body.ops[number].inputs for number in ops))
    for number in ops:
        op = body.ops[number]
        nbytes = sum(body.nbytes(value) for value in op.outputs if value in read)
        if not op.recomputable and nbytes:
            reason = f"{located(op.name, op.source)} makes them, which runs once"
            nbytes *= trips * loop.trips
            yield Unplanned(pair.kind, pair.source, nbytes, reason, not eqns[number].effects)


def _has_gradient(eqn: compat.JaxprEqn) -> bool:
    """Does an equation with bodies compute a gradient in them, by jax's own scopes?"""
    inner = (each for body in compat.bodies_of(eqn) for each in body.body.jaxpr.eqns)
    return any(_TRANSPOSED in compat.scope_of(each) or _has_gradient(each) for each in inner)


def _name(flat: Flat, number: int) -> str:
    eqn = flat.eqns[number]
    return located(eqn.primitive.name, _source(eqn))


def _source(eqn: compat.JaxprEqn) -> str:
    return compat.relative(compat.source_of(eqn))
