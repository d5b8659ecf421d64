"""Memory over time from plans and executables: it adds up, and its peak is the reported one."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings

from memplan import timelines
from memplan.candidates import Candidate
from memplan.planning.plan import Plan
from memplan.planning.simulate import Simulator
from memplan.planning.unfold import unfold
from memplan.program.hlo import Buffer, Schedule
from memplan.xla.target import Executable, Memory
from memplan.report.timeline import Timeline
from memplan.timelines import layer_of
from memplan.xla.traffic import Traffic, Transfer
from tests.planning.graphs import DRAWS, UNIT, layout_of, random_decisions, random_graph


def check(timeline: Timeline) -> None:
    """Values and the rest add up to the curves, and no moment is missing."""
    for index, instant in enumerate(timeline.instants):
        there = [stay for stay in timeline.stays if stay.first <= index < stay.last]
        for place, nbytes in (("device", instant.device_bytes - instant.other_bytes), ("host", instant.host_bytes)):
            assert sum(timeline.values[stay.value].nbytes for stay in there if stay.place == place) == nbytes
    starts = [instant.start_s for instant in timeline.instants[1:]]
    assert starts == pytest.approx([instant.end_s for instant in timeline.instants[:-1]])


@given(draw=DRAWS)
@settings(max_examples=60, deadline=None)
def test_a_plan_over_time(draw: random.Random) -> None:
    graph = random_graph(draw)
    layout = layout_of(graph)
    plan = Plan(unfold(layout, random_decisions(draw, layout))[0], "", "")
    slack = {draw.randrange(len(graph.ops)): draw.randint(1, 9)}
    replayed = Simulator(graph, UNIT, slack).run(plan)
    candidate = Candidate("any", 0, 0, 0.0, replayed.peak_nbytes, plan, slack=slack)
    found = timelines.simulated(candidate, graph, UNIT, {})
    check(found)
    assert found.instants[found.peak].device_bytes == replayed.peak_nbytes
    assert max(instant.host_bytes for instant in found.instants) == replayed.host_peak_nbytes
    assert found.end_s == pytest.approx(replayed.step_s)
    assert len(found.copies) == len(replayed.copies)


def executable() -> Candidate:
    """Ten bytes of arguments; `a` makes 100 bytes that `loop`'s body and `b` read; 40 bytes go to the host."""
    buffers = (
        Buffer("a{}", 100, 1, 6, True, False, shape="f32[25]"),
        Buffer("inner{}", 7, 2, 2, True, False),
        Buffer("copied{}", 40, 4, 7, True, True),
        Buffer("argument{}", 10, 0, 7, False, False),
    )
    steps = ("argument", "a", "inner", "loop", "copy-start", "copy-done", "b", "end")
    paths = {"a": "jit(step)/jvp(Net)/conv_0/add", "b": "jit(step)/transpose(jvp(Net))/conv_0/mul"}
    schedule = Schedule(steps, buffers, {}, paths, {"a": "net.py:3"})
    clock = {"argument": (0.0, 0.0), "a": (0.0, 1.0), "loop": (1.0, 3.0), "copy-start": (3.0, 3.0)}
    clock |= {"copy-done": (3.0, 5.0), "b": (5.0, 6.0), "end": (6.0, 6.0)}
    traffic = Traffic(
        0, 0.0, 0, 0, 4.0, 0, 0, 0.0, 0.0, 6.0, clock=clock, stalls=frozenset({(3.0, 5.0)}), seconds={"inner": 0.5},
        transfers=(Transfer("copy-start", "out", 40, 3.0, 5.0),),
    )  # fmt: skip
    memory = Memory(10 + 110, 40, 110, 10, 0, 0)  # three bytes of the heap are nobody's
    return Candidate("plain", 120, 40, 6.0, 120, executable=Executable(None, memory, schedule), traffic=traffic)


def test_an_executable_over_time() -> None:
    found = timelines.compiled(executable())
    assert found is not None
    check(found)
    assert found.instants[found.peak].device_bytes == 120
    assert max(instant.host_bytes for instant in found.instants) == 40
    told = [
        (one.name, one.layer, one.doing, one.start_s, one.end_s) for one in found.instants if one.end_s > one.start_s
    ]
    assert told == [
        ("add", "Net/conv_0", "compute", 0.0, 1.0),
        ("inner", "", "compute", 1.0, 3.0),
        ("", "", "wait", 3.0, 5.0),
        ("mul", "Net/conv_0", "compute", 5.0, 6.0),
    ]
    a = next(value for value in found.values if value.nbytes == 100)
    assert (a.shape, a.layer, a.source) == ("f32[25]", "Net/conv_0", "net.py:3")
    assert [(copy.direction, copy.nbytes) for copy in found.copies] == [("to host", 40)]
    assert any("loop" in note for note in found.notes)
    line = next(timelines.line("unmodified step", found))
    assert max(line.device_bytes) == 120 and (line.starts_s[0], line.end_s) == (0.0, 6.0)
    assert list(timelines.line("unmodified step", None)) == []


@pytest.mark.parametrize(
    ("scope", "layer"),
    [
        ("jvp(UNet3D)/down_0/Conv_0", "UNet3D/down_0/Conv_0"),
        ("transpose(jvp(UNet3D))/down_0/down_0._normalize/InstanceNorm_1", "UNet3D/down_0/InstanceNorm_1"),
        ("jit(step)/memplan.3.45/transpose(jvp(Net))/layer_7", "Net/layer_7"),
        ("jvp(Net)/while/body/closed_call/checkpoint/rematted_computation/attention", "Net/attention"),
        ("transpose(jvp())", ""),
        ("", ""),
    ],
)
def test_layers_are_named_by_the_stack_without_transforms(scope: str, layer: str) -> None:
    assert layer_of(scope) == layer
