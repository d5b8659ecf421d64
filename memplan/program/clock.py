"""When every step of a compiled program's schedule runs, by its replay."""

from __future__ import annotations

from itertools import accumulate, pairwise

from memplan.program.hlo import Schedule
from memplan.xla.traffic import Traffic


def clocked(schedule: Schedule, traffic: Traffic) -> list[tuple[float, float]]:
    """Start and end, in seconds on the compute stream, of every step.

    Steps of a loop's body come before the loop itself in a schedule. They share its time in proportion to what they
    take, as if they ran once.
    """
    times: list[tuple[float, float]] = []
    inside: list[float] = []
    for name in schedule.steps:
        if name not in traffic.clock:
            inside.append(traffic.seconds.get(name, 0.0))
            continue
        start, end = traffic.clock[name]
        if inside:
            scale = (end - start) / (sum(inside) or 1.0)
            edges = [start, *(start + scale * part for part in accumulate(inside))]
            times += pairwise(edges)
            start = edges[-1]
            inside = []
        times.append((start, end))
    return times + [(traffic.step_s, traffic.step_s)] * len(inside)
