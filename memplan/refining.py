"""One planner's plans: plan, rewrite, compile, learn where the compiler needs more than predicted, plan again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from memplan.candidates import Candidate
from memplan.compiling import Compiling, bytes_by_segment
from memplan.planning.loosen import loosened
from memplan.planning.plan import Plan
from memplan.planning.planners.protocol import Planner, Problem, Proposal
from memplan.planning.simulate import Timeline
from memplan.planning.streams import streamed
from memplan.planning.tidy import tidied
from memplan.xla.target import HIDES_LATENCY
from memplan.verify.memory import excess

Notify = Callable[[str, float | None], None]

_ATTEMPTS = 6  # plans compiled before giving up
_SPARE = 0.01  # of the budget, left to the compiler at first: half of all plans need that much more than predicted
_LEFT = 0.02  # of the budget: more than that is not left over without another try
_CAREFUL = 0.75  # of what is left: so much more the next plan may take
_LOOSE = (0.95, 0.9, 0.7)  # of the budget: where less is needed, a fitting plan is tried without fences
_STREAMING = 0.9  # of the budget for the plan where state streams; in the rest it waits beside the computation
_HOPEFUL = 1.1  # a plan predicted to miss by less than this is compiled all the same


@dataclass
class Refining:
    """A planner for a step and its budgets.

    Attributes:
      slack: bytes that the compiler was seen to need beyond the prediction, by operation (see `Simulator`).
    """

    compiling: Compiling
    budget: int
    host_budget: int
    planner: Planner
    notify: Notify
    slack: dict[int, int] = field(default_factory=dict)

    def problem(self, budget: int) -> Problem:
        device = self.compiling.target.device
        return Problem(self.compiling.graph, device, budget, self.host_budget, dict(self.slack))

    def candidates(self, is_hopeful: Callable[[Timeline], bool] = lambda timeline: True) -> Iterator[Candidate]:
        """Its plans, compiled, until one fits or nothing new comes.

        Where a plan leaves memory over, one for as much more is tried; the faster one is loosened.
        """
        held = self.compiling.program.held
        inner = self.budget - int(_SPARE * self.budget)
        compiled: set[Plan] = set()
        fitting: list[tuple[float, Proposal]] = []
        for attempt in range(_ATTEMPTS):
            self.notify(f"planning, attempt {attempt + 1}", attempt / _ATTEMPTS)
            proposal = self.proposed(inner)
            timeline = proposal.timeline
            if (not proposal.fits and timeline.peak_nbytes > _HOPEFUL * self.budget) or not is_hopeful(timeline):
                break
            if proposal.plan in compiled:
                break  # what the compiler said of it has not changed the planner's mind
            compiled.add(proposal.plan)
            candidate = self.tested(proposal, HIDES_LATENCY if held else None)
            yield candidate
            left = self.budget - candidate.device_bytes
            if candidate.fits(self.budget, self.host_budget):
                fitting.append((candidate.step_s or 0.0, proposal))
                if left < _LEFT * self.budget or len(fitting) > 1:
                    break
                inner += int(_CAREFUL * left)
            elif fitting:
                break
            else:
                inner = self.learn(proposal, candidate, inner)
        if fitting:
            _, fastest = min(fitting, key=lambda found: found[0])
            yield from self.loosened(fastest)
            if fastest.timeline.copies and self.compiling.target.is_gpu and not held:
                yield self.tested(self.streamed(fastest, self.budget), HIDES_LATENCY)

    def proposed(self, budget: int) -> Proposal:
        """What the planner says; where state is held, with copies beside computation, and room for them to wait in."""
        if not self.compiling.program.held:
            return self.asked(budget)
        proposal = self.asked(int(_STREAMING * budget))
        if not proposal.fits:
            proposal = self.asked(budget)
        return self.streamed(proposal, budget)

    def asked(self, budget: int) -> Proposal:
        """What the planner says, tidied."""
        proposal = self.planner.propose(self.problem(budget))
        plan = tidied(proposal.plan, self.compiling.graph)
        return proposal if plan is proposal.plan else self.replayed(proposal, plan)

    def replayed(self, proposal: Proposal, plan: Plan) -> Proposal:
        return replace(proposal, plan=plan, timeline=self.compiling.simulated(plan, self.slack))

    def streamed(self, proposal: Proposal, budget: int) -> Proposal:
        plan = streamed(proposal.plan, self.compiling.graph, self.compiling.target.device, proposal.timeline, budget)
        return self.replayed(proposal, plan)

    def loosened(self, proposal: Proposal) -> Iterator[Candidate]:
        """The plan with fewer fences, until that fits too: mostly faster, in the same memory."""
        if not self.compiling.target.is_gpu or self.compiling.program.held:
            return
        known, layout = {proposal.plan}, self.problem(self.budget).layout()
        for share in _LOOSE:
            plan = loosened(proposal.plan, proposal.timeline, layout, share * self.budget)
            if plan in known:
                continue
            known.add(plan)
            candidate = self.tested(self.replayed(proposal, plan), None)
            yield candidate
            if candidate.fits(self.budget, self.host_budget):
                return

    def learn(self, proposal: Proposal, candidate: Candidate, inner: int) -> int:
        """Take the compiler's own bytes per segment as constraints; what they do not explain narrows the budget."""
        moments = proposal.timeline.moments
        measured = bytes_by_segment(candidate)
        found = excess([m.device_nbytes for m in moments], [m.op for m in moments], measured)
        for op, nbytes in found.items():
            self.slack[op] = self.slack.get(op, 0) + nbytes
        unexplained = candidate.device_bytes - max(measured.values(), default=0)
        return min(inner, self.budget - unexplained)

    def tested(self, proposal: Proposal, flags: Mapping[str, Any] | None) -> Candidate:
        """What the planner says, compiled."""
        self.notify("compiling the planned step", None)
        candidate = self.compiling.planned(proposal.plan, proposal.timeline.peak_nbytes, flags)
        return replace(candidate, gap_s=proposal.gap_s, slack=dict(self.slack))
