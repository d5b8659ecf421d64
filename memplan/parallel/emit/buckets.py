"""Which sums travel together: those that nothing waits for, cut into buckets that go under the rest of the step."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from memplan.hardware.collectives import all_reduce_seconds, cheapest
from memplan.hardware.device import Device
from memplan.hardware.topology import Topology
from memplan.parallel.partition.assigned import Assigned
from memplan.parallel.partition.placement import PARTIAL
from memplan.planning.buckets import cut
from memplan.planning.graph import op_seconds
from memplan.program import compat
from memplan.program.extract import body_graph

HEAVY = {"dot_general", "conv_general_dilated", "scan", "while", "custom_linear_solve"}
LARGEST_BYTES = 128 << 20
"""Of a bucket: it is a buffer on the device, as its terms are."""

_LEFT_UNFUSED = 0.2  # of elementwise traffic, after fusion: ResNet-50 at batch 32 on a P100, compiled

_SURE = 0.7  # of the predicted seconds of computation: so much is counted on to send beside

SMALL_BYTES = 1 << 12
"""Of a sum: below that it is not compressed."""


@dataclass(frozen=True)
class Buckets:
    """Which sums travel together.

    Attributes:
      number: variable -> its bucket, for sums that are first read after heavy work that does not need them. The others
        (batch statistics, a norm) are needed at once; they go when they are read.
      exact: buckets that are never compressed: metrics, and what is too small to gain from it.
    """

    number: Mapping[Any, int] = field(default_factory=dict)
    exact: frozenset[int] = frozenset()


def sunk(assigned: Assigned) -> Assigned:
    """The same with what reads sums last, unless heavy work needs it: updates, running statistics, metrics.

    The sums then travel beside the heavy work. Level by level: what others wait for is made when the first of them is
    needed.
    """
    eqns = assigned.jaxpr.jaxpr.eqns
    order = _terms_first(assigned)
    needed: set[Any] = set()
    for eqn in (eqns[number] for number in reversed(order)):
        if eqn.primitive.name in HEAVY or not needed.isdisjoint(eqn.outvars):
            needed.update(filter(compat.is_var, eqn.invars))
            needed.update(eqn.outvars)
    level = dict.fromkeys(assigned.rests, 0)
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
    jaxpr = compat.reordered(assigned.jaxpr, [eqns[number] for number in order])
    return replace(assigned, jaxpr=jaxpr, steps=tuple(assigned.steps[number] for number in order))


def _terms_first(assigned: Assigned) -> list[int]:
    """Numbers of equations, those that turn terms into terms as early as can be: `rate * gradient` behind the gradient.

    Written where the weights are updated, they would hold all sums back until the last gradient is there.
    """
    made_at: dict[Any, tuple[int, int]] = {}
    places: list[tuple[int, int]] = []
    for number, (eqn, step) in enumerate(zip(assigned.jaxpr.jaxpr.eqns, assigned.steps, strict=True)):
        place = number, 0
        if PARTIAL in step.needs and PARTIAL in step.gives and not step.bodies:
            read = [made_at.get(atom, (-1, 0)) for atom in eqn.invars if compat.is_var(atom)]
            place = max(read)[0], number
        places.append(place)
        made_at.update(dict.fromkeys(eqn.outvars, place))
    return sorted(range(len(places)), key=places.__getitem__)


def buckets(assigned: Assigned, topology: Topology, device: Device, compresses: bool) -> Buckets:
    """Cut what can wait by the time at which it is made; what is made after all heavy work goes last, together."""
    patient, final = _patient(assigned)
    small = [var for var in (*patient, *final) if compresses and compat.nbytes_of(var.aval) < SMALL_BYTES]
    exact = dict.fromkeys(small, -1)
    patient, final = ([var for var in some if var not in exact] for some in (patient, final))
    ranges: tuple[range, ...] = ()
    if patient:
        made_s = _made_s(assigned, topology.devices, device)

        @functools.cache
        def seconds(size: int) -> float:
            return all_reduce_seconds(topology, cheapest(topology, size), size)

        nbytes = [compat.nbytes_of(var.aval) for var in patient]
        end_s = max(made_s.values())
        ready_s = [end_s - _SURE * (end_s - made_s[var]) for var in patient]
        ranges = cut(ready_s, nbytes, seconds, largest_nbytes=LARGEST_BYTES)
    number = {patient[i]: number for number, members in enumerate(ranges) for i in members}
    return Buckets({**number, **dict.fromkeys(final, len(ranges)), **exact}, frozenset(exact.values()))


def _patient(assigned: Assigned) -> tuple[list[Any], list[Any]]:
    """Sums in the order they are made: those read after heavy work, and those that only what comes after all reads."""
    eqns = assigned.jaxpr.jaxpr.eqns
    first_read: dict[Any, int] = {}
    heavy_before = [0]
    waiting: set[Any] = set()  # made of sums
    for number, eqn in enumerate(eqns):
        heavy_before.append(heavy_before[-1] + (eqn.primitive.name in HEAVY))
        operands = set(filter(compat.is_var, eqn.invars))
        for atom in operands:
            first_read.setdefault(atom, number)
        if any(atom in assigned.rests or atom in waiting for atom in operands):
            waiting.update(eqn.outvars)
    patient, final = [], []
    for number, eqn in enumerate(eqns):
        for var in filter(assigned.rests.__contains__, eqn.outvars):
            read = heavy_before[first_read.get(var, len(eqns))]
            if read > heavy_before[number + 1]:
                patient.append(var)
            elif read == heavy_before[-1] and var not in waiting:
                final.append(var)
    return patient, final


def _made_s(assigned: Assigned, devices: int, device: Device) -> Mapping[Any, float]:
    """When every variable is made, equations one after another, each in its part."""
    closed = assigned.jaxpr
    graph = body_graph(closed)
    now, found = 0.0, {}
    for eqn, op, step in zip(closed.jaxpr.eqns, graph.ops, assigned.steps, strict=True):
        layouts = (*step.needs, *step.gives)
        part = devices if any(not layout.is_whole for layout in layouts) else 1
        melted = 1.0 if op.fusion in ("kernel", "reduction") else _LEFT_UNFUSED
        now += melted * op_seconds(graph, op, device) / part
        found.update(dict.fromkeys(eqn.outvars, now))
    return found
