"""The order in which the programs of a step are explored, and which of them is compiled.

A program is *explored*: XLA fuses and schedules it, memplan plans it, its bytes and seconds are
predicted, and the compilation ends there. memplan explores one program after another until one
fits: the step itself, the step with loops that read their stacks by index, with as few residuals
fewer as needed, and with parts in slabs. A program that copies is scheduled by XLA's latency-hiding
scheduler first, then by the serial one, which uses less memory. A plan that fits but is slow is
compared with the other programs.

The best program is compiled: at once, if nothing else is to be explored after it. Only that may
exceed its prediction; it is then compiled again with a budget that is lower by the excess.
"""

from dataclasses import dataclass, field, replace

from memplan.compilation.compiler import Commits, Compiler, Notify, always
from memplan.compilation.limits import Headroom
from memplan.compilation.outcome import Explored, Outcome, ProgramSummary, SlabAttempt
from memplan.compilation.scheduled import ScheduledModule
from memplan.compilation.variants import Proposal, Proposals, Variants, better, needs_better
from memplan.planning.plan import Plan
from memplan.program.candidates import Candidates
from memplan.program.trace import Program

# Compile one program by one schedule at most this often. Each time corrects the last prediction.
MOST_TRIES = 3


@dataclass
class _History:
    """All programs of a step, and how far XLA compiled them."""

    compilations: int = 0
    explorations: int = 0
    # the first program's module, if that was unmodified
    unmodified: ScheduledModule | None = None
    # of all programs in slabs, the one that exceeds the limits least
    closest_slab_attempt: SlabAttempt | None = None
    # of all programs, in order
    summaries: list[ProgramSummary] = field(default_factory=list)
    # programs that fit as predicted, and were not compiled
    fitting: list[Explored] = field(default_factory=list)

    def add(self, explored: Explored) -> None:
        if not self.summaries and explored.program.rewritten is None:
            self.unmodified = explored.planned.plain
        if isinstance(explored, Outcome):
            self.compilations += 1
        else:
            self.explorations += 1
            self.fitting += [explored] if explored.fits else []
        self.summaries.append(explored.summary)
        if explored.program.in_slabs:
            sizes = explored.device_bytes, explored.host_bytes
            attempt = SlabAttempt(explored.program.in_slabs, *sizes, explored.limits.excess(*sizes))
            closest = self.closest_slab_attempt
            if closest is None or attempt.excess_bytes < closest.excess_bytes:
                self.closest_slab_attempt = attempt


@dataclass(frozen=True)
class Attempts:
    """Explores the programs of one step until one fits, and compiles the best."""

    compiler: Compiler
    candidates: Candidates
    notify: Notify
    follow: Plan | None = None  # a saved plan to follow; no other program is explored
    tries: int = MOST_TRIES  # most compilations of one program by one schedule
    copies_overlap: bool = True  # the target runs copies and kernels at the same time
    history: _History = field(default_factory=_History)  # what `run` has explored and compiled

    def run(self, program: Program) -> Outcome:
        """The first outcome that fits, a faster one if that is slow, or the smallest if none
        fits.
        """
        best = self._explore(Proposal(program))
        if self.follow is None:
            variants = Variants(self.candidates, self.notify, self.tries)
            unmodified = self.history.unmodified
            best = self._best_of(best, variants.indexed_stacks(best))
            best = self._best_of(best, variants.fewer_residuals(best, unmodified))
            best = self._best_of(best, variants.in_slabs(best))
        outcome = self._compiled(best)
        rejected = self.history.summaries.copy()
        rejected.remove(outcome.summary)
        return replace(
            outcome,
            rejected=tuple(rejected),
            unmodified=self.history.unmodified,
            compilations=self.history.compilations,
            explorations=self.history.explorations,
            closest_slab_attempt=self.history.closest_slab_attempt,
        )

    def _best_of(self, best: Explored, proposals: Proposals[None]) -> Explored:
        """The best program, also of the proposed ones, if a better one is needed."""
        if not needs_better(best):
            return best
        proposal = next(proposals, None)
        while proposal is not None:
            explored = self._explore(proposal)
            best = better(best, explored)
            try:
                proposal = proposals.send(explored)
            except StopIteration:
                proposal = None
        return best

    def _explore(self, proposal: Proposal) -> Explored:
        """By the latency-hiding scheduler if the program copies, then by the serial one.

        A program in slabs is scheduled by the first alone. A saved plan fits only the schedule that
        it was made for, and is compiled.
        """
        program = proposal.program
        commits = always if self.follow else proposal.commits
        planned_for = self.follow.hides_latency if self.follow else None
        if planned_for is not None:
            return self._within_limits(program, planned_for, commits)
        copies = copies_by_itself(program)
        best = self._within_limits(program, copies, commits)
        if not best.fits and copies and self.copies_overlap and not program.in_slabs:
            self.notify("compiling again, its copies one after another", None)
            best = better(best, self._within_limits(program, False, commits))
        return best

    def _compiled(self, best: Explored) -> Outcome:
        """The best program compiled; if it exceeds its prediction, the next that should fit."""
        if isinstance(best, Outcome):
            return best
        outcomes = list[Outcome]()
        fitting = sorted(self.history.fitting, key=lambda explored: explored.rank)
        for explored in fitting or [best]:
            self.history.summaries.remove(explored.summary)
            outcome = self._within_limits(explored.program, explored.hides_latency, always)
            assert isinstance(outcome, Outcome)
            outcomes.append(outcome)
            if outcome.fits:
                break
        return min(outcomes, key=lambda outcome: outcome.rank)

    def _within_limits(self, program: Program, hides_latency: bool, commits: Commits) -> Explored:
        """By one of XLA's schedulers; compiled again with more headroom if a prediction was too
        low.

        It stops when the outcome fits, is predicted not to fit, or has used all tries.
        """
        self.notify("compiling", None)
        headroom = Headroom()
        outcome = self._compile(program, hides_latency, headroom, commits)
        for _ in range(self.tries - 1):
            is_done = not isinstance(outcome, Outcome) or outcome.fits or not outcome.planned.fits
            if is_done or self.follow is not None:
                break
            self.notify("compiling again, within what the first plan missed by", None)
            sizes = outcome.device_bytes, outcome.host_bytes
            headroom = headroom.plus_overshoot(outcome.limits, *sizes)
            outcome = self._compile(program, hides_latency, headroom, always)
        return outcome

    def _compile(
        self, program: Program, hides_latency: bool, headroom: Headroom, commits: Commits
    ) -> Explored:
        explored = self.compiler.explore(program, hides_latency, headroom, commits)
        self.history.add(explored)
        return explored


def copies_by_itself(program: Program) -> bool:
    """Whether the program copies between host and device without a plan."""
    return any(transform.uses_host for transform in program.transforms)
