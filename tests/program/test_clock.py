"""Times of the steps of a schedule."""

from __future__ import annotations

from memplan.program.clock import clocked
from memplan.program.hlo import Schedule
from memplan.xla.traffic import Traffic


def test_a_body_shares_the_time_of_its_loop() -> None:
    schedule = Schedule(("a", "inner", "view", "longer", "loop", "b", "beyond"), (), {}, {})
    traffic = Traffic(
        0, 0.0, 0, 0, 0.0, 0, 0, 0.0, 0.0, step_s=9.0, seconds={"a": 1.0, "inner": 0.1, "longer": 0.3, "b": 1.0},
        clock={"a": (0.0, 1.0), "loop": (1.0, 5.0), "b": (5.0, 6.0)},
    )  # fmt: skip
    assert clocked(schedule, traffic) == [
        (0.0, 1.0),
        (1.0, 2.0),
        (2.0, 2.0),
        (2.0, 5.0),
        (5.0, 5.0),
        (5.0, 6.0),
        (9.0, 9.0),
    ]


def test_a_body_that_takes_no_time_leaves_it_to_the_loop() -> None:
    schedule = Schedule(("inner", "loop"), (), {}, {})
    traffic = Traffic(0, 0.0, 0, 0, 0.0, 0, 0, 0.0, 0.0, step_s=4.0, clock={"loop": (1.0, 4.0)})
    assert clocked(schedule, traffic) == [(1.0, 1.0), (1.0, 4.0)]
