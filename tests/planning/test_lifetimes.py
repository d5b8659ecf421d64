"""The simulator's figures taken apart: every instant adds up, and nothing is lost or invented."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings

from memplan.planning.devices import Device
from memplan.planning.lifetimes import Lifetimes, lifetimes
from memplan.planning.plan import Kind, Plan
from memplan.planning.simulate import Simulator
from memplan.planning.straight import straight
from memplan.planning.unfold import keep_everything, unfold
from tests.planning.graphs import (
    DRAWS,
    UNIT,
    UNIT_GPU,
    chain,
    layout_of,
    random_decisions,
    random_graph,
    training_stack,
)


def check(simulator: Simulator, plan: Plan) -> Lifetimes:
    """Everything that must hold of any plan."""
    found, graph = lifetimes(simulator, plan), simulator.graph
    assert found.timeline == simulator.run(plan)
    instants = found.instants
    for index, instant in enumerate(instants):
        alive = [life for life in found.lifetimes if life.first <= index < life.last]
        device = sum(graph.passing_nbytes(life.value) for life in alive if not life.on_host)
        assert instant.device_nbytes == found.base_nbytes + device + instant.extra_nbytes
        assert instant.host_nbytes == sum(graph.nbytes(life.value) for life in alive if life.on_host)
        assert instant.extra_nbytes >= 0
    for number, moment in enumerate(found.timeline.moments):
        own = [instant for instant in instants if instant.segment == number]
        assert max(instant.device_nbytes for instant in own) == moment.device_nbytes
        assert (own[0].start_s, own[-1].end_s) == (pytest.approx(moment.start_s), pytest.approx(moment.end_s))
        idle = sum(instant.end_s - instant.start_s for instant in own if instant.op < 0)
        assert idle == pytest.approx(moment.stall_s, abs=1e-9 * (1 + moment.end_s))
    assert all(earlier.end_s == pytest.approx(later.start_s) for earlier, later in pairwise(instants))
    return found


@pytest.mark.parametrize("device", [UNIT, UNIT_GPU], ids=lambda device: device.name)
@given(draw=DRAWS)
@settings(max_examples=60, deadline=None)
def test_every_instant_adds_up(device: Device, draw: random.Random) -> None:
    graph = random_graph(draw)
    layout = layout_of(graph)
    slack = {draw.randrange(len(graph.ops)): draw.randint(1, 9)}
    check(Simulator(graph, device, slack), Plan(unfold(layout, random_decisions(draw, layout))[0], "", ""))
    check(Simulator(graph, device), straight(graph, ""))


def test_a_kept_chain() -> None:
    graph = chain(3, nbytes=10)
    found = check(Simulator(graph, UNIT), keep_everything(layout_of(graph), ""))
    assert found.base_nbytes == 20
    assert [(i.op, i.again, i.start_s, i.end_s, i.device_nbytes) for i in found.instants] == [
        (0, False, 0, 20, 30),
        (1, False, 20, 40, 40),
        (2, False, 40, 60, 30),
    ]
    assert [(life.value, life.first, life.last) for life in found.lifetimes] == [(1, 0, 2), (2, 1, 3)]


def test_waiting_and_running_again_are_told() -> None:
    graph = training_stack(3)
    layout, simulator = layout_of(graph), Simulator(graph, UNIT)
    for seed in range(20):
        plan = Plan(unfold(layout, random_decisions(random.Random(seed), layout))[0], "", "")
        found, runs = check(simulator, plan), [a.target for a in plan.actions if a.kind is Kind.COMPUTE]
        repeated = {instant.op for instant in found.instants if instant.again}
        assert repeated <= {op for op in runs if runs.count(op) > 1}
        moved = {a.target for a in plan.actions if a.kind is Kind.OFFLOAD}
        assert {life.value for life in found.lifetimes if life.on_host} == moved
        if repeated and moved and any(instant.op < 0 for instant in found.instants):
            return
    raise AssertionError("no plan among these runs anything again, moves anything and waits")
