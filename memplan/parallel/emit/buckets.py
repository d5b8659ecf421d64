"""Buckets of sums: gradients that nothing waits for are reduced together, beside the rest of the backward pass."""

import functools
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from memplan.hardware.collectives import all_reduce_seconds, cheapest
from memplan.hardware.device import Device
from memplan.hardware.topology import Topology
from memplan.parallel.partition.sharded import Partial, Replicate, Sharded
from memplan.planning.buckets import contiguous_buckets
from memplan.planning.graph import op_seconds
from memplan.program import compat
from memplan.program.flat import Flat

_HEAVY = {"dot_general", "conv_general_dilated", "scan", "while", "custom_linear_solve"}
_LARGEST_NBYTES = 128 << 20  # of a bucket, which is a buffer on the device beside its terms
_LEFT_UNFUSED = 0.2  # of elementwise traffic, after fusion: ResNet-50 at batch 32 on a P100, compiled
_SURE = 0.7  # the share of the predicted compute time that counts as available for overlap
_SMALLEST_NBYTES = 1 << 12  # smaller sums are not compressed


@dataclass(frozen=True)
class Buckets:
    """Which sums are reduced together."""

    # Variable -> number of its bucket, for sums that heavy work runs before their first read. The others (batch
    # statistics, a norm) are needed at once and reduced when they are read.
    bucket_of: Mapping[Any, int] = field(default_factory=dict)
    uncompressed: frozenset[int] = frozenset()  # buckets that are never compressed: metrics and small sums


def sink_reads(sharded: Sharded) -> Sharded:
    """Move equations that read sums to the end, unless heavy work needs them: updates, running statistics, metrics.

    Sums are then reduced beside the heavy work. Late equations are sorted by how many sums they wait for in a row.
    """
    eqns = sharded.jaxpr.jaxpr.eqns
    order = _terms_first(sharded)
    needed: set[Any] = set()
    for eqn in (eqns[number] for number in reversed(order)):
        if eqn.primitive.name in _HEAVY or not needed.isdisjoint(eqn.outvars):
            needed.update(filter(compat.is_var, eqn.invars))
            needed.update(eqn.outvars)
    level = dict.fromkeys(sharded.reductions, 0)
    early: list[int] = []
    late: list[tuple[int, int]] = []
    for number in order:
        eqn = eqns[number]
        below = [level[atom] for atom in eqn.invars if compat.is_var(atom) and atom in level]
        if not below or not needed.isdisjoint(eqn.outvars):
            early.append(number)
        else:
            late.append((1 + max(below), number))
            level.update(dict.fromkeys(eqn.outvars, 1 + max(below)))
    order = [*early, *(number for _, number in sorted(late, key=operator.itemgetter(0)))]
    jaxpr = compat.with_eqns(sharded.jaxpr, [eqns[number] for number in order])
    return replace(sharded, jaxpr=jaxpr, eqns=tuple(sharded.eqns[number] for number in order))


def _terms_first(sharded: Sharded) -> list[int]:
    """Numbers of equations, with those that turn terms into terms as early as possible: `rate * gradient`, for example.

    Left at the update of the weights, they would delay all sums until the last gradient is made.
    """
    made_at: dict[Any, tuple[int, int]] = {}
    places: list[tuple[int, int]] = []
    for number, (eqn, one) in enumerate(zip(sharded.jaxpr.jaxpr.eqns, sharded.eqns, strict=True)):
        place = number, 0
        if Partial() in one.operands and Partial() in one.results and not one.bodies:
            read = [made_at.get(atom, (-1, 0)) for atom in eqn.invars if compat.is_var(atom)]
            place = max(read)[0], number
        places.append(place)
        made_at.update(dict.fromkeys(eqn.outvars, place))
    return sorted(range(len(places)), key=places.__getitem__)


def assign_buckets(sharded: Sharded, topology: Topology, device: Device, compresses: bool) -> Buckets:
    """Put deferrable sums into buckets by the time they are made; those after all heavy work form the last bucket."""
    deferrable, final = _deferrable(sharded)
    small = [var for var in (*deferrable, *final) if compresses and compat.nbytes_of(var.aval) < _SMALLEST_NBYTES]
    exact = dict.fromkeys(small, -1)
    deferrable, final = ([var for var in some if var not in exact] for some in (deferrable, final))
    ranges: tuple[range, ...] = ()
    if deferrable:
        made_s = _made_s(sharded, topology.devices, device)

        @functools.cache
        def seconds(size: int) -> float:
            return all_reduce_seconds(topology, cheapest(topology, size), size)

        nbytes = [compat.nbytes_of(var.aval) for var in deferrable]
        end_s = max(made_s.values())
        ready_s = [end_s - _SURE * (end_s - made_s[var]) for var in deferrable]
        ranges = contiguous_buckets(ready_s, nbytes, seconds, largest_nbytes=_LARGEST_NBYTES)
    number = {deferrable[i]: number for number, members in enumerate(ranges) for i in members}
    return Buckets({**number, **dict.fromkeys(final, len(ranges)), **exact}, frozenset(exact.values()))


def _deferrable(sharded: Sharded) -> tuple[list[Any], list[Any]]:
    """Sums in the order they are made: those read after further heavy work, and those made after all of it."""
    eqns = sharded.jaxpr.jaxpr.eqns
    first_read: dict[Any, int] = {}
    heavy_before = [0]
    waiting: set[Any] = set()  # computed from sums
    for number, eqn in enumerate(eqns):
        heavy_before.append(heavy_before[-1] + (eqn.primitive.name in _HEAVY))
        operands = set(filter(compat.is_var, eqn.invars))
        for atom in operands:
            first_read.setdefault(atom, number)
        if any(atom in sharded.reductions or atom in waiting for atom in operands):
            waiting.update(eqn.outvars)
    deferrable, final = [], []
    for number, eqn in enumerate(eqns):
        for var in filter(sharded.reductions.__contains__, eqn.outvars):
            read = heavy_before[first_read.get(var, len(eqns))]
            if read > heavy_before[number + 1]:
                deferrable.append(var)
            elif read == heavy_before[-1] and var not in waiting:
                final.append(var)
    return deferrable, final


def _made_s(sharded: Sharded, devices: int, device: Device) -> Mapping[Any, float]:
    """The time at which each variable is made, with equations in order, each on the device's part."""
    graph = Flat(sharded.jaxpr).graph
    now, found = 0.0, {}
    for eqn, op, one in zip(sharded.jaxpr.jaxpr.eqns, graph.ops, sharded.eqns, strict=True):
        is_divided = any(placement != Replicate() for placement in (*one.operands, *one.results))
        part = devices if is_divided else 1
        unfused = 1.0 if op.fusion in ("kernel", "reduction") else _LEFT_UNFUSED
        now += unfused * op_seconds(graph, op, device) / part
        found.update(dict.fromkeys(eqn.outvars, now))
    return found
