"""When every step of a compiled program's schedule runs, by its replay."""

from __future__ import annotations

from memplan.program.hlo import Schedule
from memplan.program.traffic import Traffic


def clocked(schedule: Schedule, traffic: Traffic) -> list[tuple[float, float]]:
    """Start and end, in seconds on the compute stream, of every step.

    Steps of a loop's body come before the loop itself in a schedule. They share its time evenly, as if they ran once.
    """
    times: list[tuple[float, float]] = []
    inside = 0
    for name in schedule.steps:
        known = traffic.clock.get(name)
        if known is None:
            inside += 1
            continue
        start, width = known[0], (known[1] - known[0]) / (inside + 1)
        times += [(start + part * width, start + (part + 1) * width) for part in range(inside)]
        times.append((start + inside * width, known[1]))
        inside = 0
    return times + [(traffic.step_s, traffic.step_s)] * inside
