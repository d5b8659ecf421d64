"""What a planner is asked and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from memplan.planning.cost import has_triton
from memplan.planning.devices import Device
from memplan.planning.graph import Graph
from memplan.planning.layout import Layout, cut
from memplan.planning.order import early_loose_ends
from memplan.planning.plan import Plan
from memplan.planning.simulate import Timeline


@dataclass(frozen=True)
class Problem:
    """A graph to be planned.

    Attributes:
      budget_bytes: device bytes that the simulated peak may reach.
      host_budget_bytes: host bytes for offloaded values; 0 forbids offloading.
      slack: bytes the compiler was seen to need beyond the model, by operation (see `Simulator`).
    """

    graph: Graph
    device: Device
    budget_bytes: int
    host_budget_bytes: int
    slack: Mapping[int, int] = field(default_factory=dict)

    def layout(self) -> Layout:
        """The program in its best order, cut into segments that suit the budget."""
        order, least = early_loose_ends(self.graph), fence_nbytes(self.budget_bytes)
        return cut(self.graph, order, least, has_triton(self.device), finely=self.device.target is not None)

    def is_kept_by(self, timeline: Timeline) -> bool:
        """Are both budgets kept?"""
        device, host = timeline.peak_nbytes, timeline.host_peak_nbytes
        return device <= self.budget_bytes and host <= self.host_budget_bytes


@dataclass(frozen=True)
class Proposal:
    """A planner's best plan.

    Attributes:
      fits: whether its own prediction is within the budget.
      gap_s: seconds by which any plan that the planner could have made may be faster; None where it does not know.
    """

    plan: Plan
    timeline: Timeline
    fits: bool
    gap_s: float | None = None


def rank(proposal: Proposal) -> tuple[bool, float, int]:
    """For `min`: what fits comes first, the faster the better; what does not, by its peak.

    Copies count in full, since XLA does not run them beside computation by itself.
    """
    timeline = proposal.timeline
    seconds = timeline.compute_s + sum(copy.end_s - copy.start_s for copy in timeline.copies)
    return not proposal.fits, seconds if proposal.fits else 0.0, timeline.peak_nbytes


def fence_nbytes(budget_bytes: int) -> int:
    """Kernels that touch less than a thousandth of the budget get no fence of their own."""
    return max(1, budget_bytes // 1000)


class Planner(Protocol):
    """Anything that answers a problem with a legal plan, within the budget if it can."""

    @property
    def name(self) -> str: ...

    def propose(self, problem: Problem) -> Proposal: ...
