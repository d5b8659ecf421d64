"""A way to run the step that was measured, chosen or not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from memplan.planning.graph import Graph
from memplan.planning.plan import Plan
from memplan.program.executor import Stages
from memplan.program.targets import Executable
from memplan.program.trace import Program
from memplan.verify.effect import Effect
from memplan.xla.traffic import Traffic


@dataclass(frozen=True)
class Candidate:
    """A way to run the step that the compiler has measured.

    Attributes:
      name: `plain`, `xla` or a planner's name.
      device_bytes, host_bytes: by the compiler.
      step_s: seconds of a step by the roofline.
      traffic: what it moves, by the compiler's schedule; None where it gives none.
      predicted_bytes: device bytes predicted before it was compiled.
      slack: with which they were predicted; see `Simulator`.
      executable: where one program holds it; None where it is compiled segment by segment.
      gap_s: see `Proposal`.
      strange: collectives that the program has and the executable has not, or the other way, in words.
      effect: what of the plan is in the executable; None where nobody looked, since it is compiled as it is planned.
      program, graph: what runs in the plan's order: the step, with loops of its own or the plan's.
    """

    name: str
    device_bytes: int
    host_bytes: int
    step_s: float | None
    predicted_bytes: int
    plan: Plan | None = None
    executable: Executable | None = None
    stages: Stages | None = None
    compiler_options: Mapping[str, Any] = field(default_factory=dict)
    gap_s: float | None = None
    effect: Effect | None = None
    traffic: Traffic | None = None
    program: Program | None = None
    graph: Graph | None = None
    strange: tuple[str, ...] = ()
    slack: Mapping[int, int] = field(default_factory=dict)

    @property
    def dropped(self) -> tuple[str, ...]:
        """What the plan says and the executable does not do."""
        return (*(self.effect.dropped if self.effect else ()), *self.strange)

    def fits(self, budget: int, host_budget: int) -> bool:
        """Within both budgets (bytes), and doing what its plan says."""
        return self.device_bytes <= budget and self.host_bytes <= host_budget and not self.dropped
