"""The order in which the programs of a step are explored, and which of them is compiled.

A program is *explored*: XLA fuses and schedules it, memplan plans it, its bytes and seconds are
predicted, and the compilation ends there. memplan explores one program after another until one
fits: the step itself, the step with loops that read their stacks by index, with as few residuals
fewer as needed, with algorithms that need less workspace, and with parts in slabs. A program that
copies is scheduled by XLA's latency-hiding scheduler first, then by the serial one, which uses less
memory. A plan that fits but is slow is compared with the other programs.

The best program is compiled: at once, if nothing else is to be explored after it. Only that may
exceed its prediction; it is then compiled again with a budget that is lower by the excess. A study
of many sizes or budgets explores them all, and has few compiled.

Ctrl-C ends the exploration of a step that is to run: the best so far is compiled. So does a time
limit, which is checked between programs; without one, no clock decides anything.
"""

import logging
from dataclasses import dataclass, field, replace

from memplan.compilation.compiler import Commits, Compiler, Notify, always, never
from memplan.compilation.deadline import CTRL_C, NEVER, TIME_LIMIT, Deadline, DeadlinePassed
from memplan.compilation.limits import Headroom
from memplan.compilation.outcome import Explored, Outcome, ProgramSummary, SlabAttempt
from memplan.compilation.scheduled import ScheduledModule
from memplan.compilation.variants import Proposal, Proposals, Variants, better, needs_better
from memplan.planning.plan import Plan
from memplan.program.candidates import Candidates
from memplan.program.trace import Program
from memplan.units import format_bytes, format_seconds

_log = logging.getLogger("memplan")

# Compile one program by one schedule at most this often. Each time corrects the last prediction.
MOST_TRIES = 3


@dataclass
class History:
    """All programs of a step, and how far XLA compiled them."""

    compilations: int = 0
    explorations: int = 0
    # the first program's module, if that was unmodified
    unmodified: ScheduledModule | None = None
    smallest_unmodified: ProgramSummary | None = None  # the smallest plan for the unmodified step
    # of all programs in slabs, the one that exceeds the limits least
    closest_slab_attempt: SlabAttempt | None = None
    # of all programs, in order
    summaries: list[ProgramSummary] = field(default_factory=list)
    # programs that fit as predicted, and were not compiled
    fitting: list[Explored] = field(default_factory=list)
    best: Explored | None = None  # of all programs
    ended_by: str = ""  # see `Outcome.ended_by`

    @property
    def standing(self) -> str:
        """What is in hand, as a part of a progress line; "" before the first program."""
        best = self.best
        if best is None:
            return ""
        if not best.fits:
            sizes = format_bytes(best.device_bytes), format_bytes(best.limits.device_bytes)
            return f": nothing fits yet, the smallest takes {sizes[0]} of {sizes[1]}"
        in_hand = f": in hand {_figures(best)}"
        if not needs_better(best):
            return in_hand
        return f"{in_hand}, at best {format_seconds(best.planned.bound_s)}"

    def add(self, explored: Explored) -> None:
        if not explored.program.transforms:
            if not self.summaries:
                self.unmodified = explored.planned.plain
            plans = filter(None, (self.smallest_unmodified, explored.summary))
            self.smallest_unmodified = min(plans, key=lambda plan: plan.device_bytes)
        if isinstance(explored, Outcome):
            self.compilations += 1
        else:
            self.explorations += 1
            self.fitting += [explored] if explored.fits else []
        self.summaries.append(explored.summary)
        self.best = explored if self.best is None else better(self.best, explored)
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
    compiles: bool = True  # compile a good program at once; else nothing before `commit`
    any_that_fits: bool = False  # explore until a program fits, however slow it is
    keeps_fitting: bool = False  # Ctrl-C ends `explore` if a program fits
    deadline: Deadline = NEVER  # ends `explore` after the program in hand, whether it fits or not
    history: History = field(default_factory=History)  # what was explored and compiled

    def explore(self, program: Program) -> Explored:
        """The first program that fits, a faster one if that is slow, or the smallest if none fits.

        It is an `Outcome` if it was compiled at once.

        Raises:
          KeyboardInterrupt: Ctrl-C was pressed, and no program that fits is to be kept.
        """
        try:
            best = self._search(program)
        except KeyboardInterrupt:
            in_hand = self.history.best
            if not self.keeps_fitting or in_hand is None or not in_hand.fits:
                raise
            self.history.ended_by = CTRL_C
            self.notify("interrupted (again to stop), with a program in hand", None)
            best = in_hand
        except DeadlinePassed:
            in_hand = self.history.best
            assert in_hand is not None  # the first program is explored however long it takes
            self.history.ended_by = TIME_LIMIT
            best = in_hand
        return self._with_others(best)

    def _with_others[Result: Explored](self, best: Result) -> Result:
        """The best program, with what is to be known of the others."""
        return replace(
            best,
            unmodified=self.history.unmodified,
            smallest_unmodified=self.history.smallest_unmodified,
            closest_slab_attempt=self.history.closest_slab_attempt,
        )

    def _search(self, program: Program) -> Explored:
        best = self._explore(Proposal(program, "the step"))
        if self.follow is None:
            variants = Variants(self.candidates, self._begin, self.tries)
            unmodified = self.history.unmodified
            best = self._best_of(best, variants.indexed_stacks(best))
            best = self._best_of(best, variants.fewer_residuals(best, unmodified))
            best = self._best_of(best, variants.less_workspace(best))
            best = self._best_of(best, variants.in_slabs(best))
        return best

    def commit(self, best: Explored) -> Outcome:
        """The best program compiled; if it exceeds its prediction, the next that should fit."""
        outcome = self._compiled(best)
        rejected = self.history.summaries.copy()
        rejected.remove(outcome.summary)
        return replace(
            self._with_others(outcome),
            rejected=tuple(rejected),
            compilations=self.history.compilations,
            explorations=self.history.explorations,
            ended_by=self.history.ended_by,
        )

    def _best_of(self, best: Explored, proposals: Proposals[None]) -> Explored:
        """The best program, also of the proposed ones, if a better one is needed."""
        if self._is_enough(best):
            return best
        proposal = next(proposals, None)
        while proposal is not None:
            explored = self._explore(proposal)
            best = better(best, explored)
            if self.any_that_fits and best.fits:
                return best
            try:
                proposal = proposals.send(explored)
            except StopIteration:
                proposal = None
        return best

    def _is_enough(self, best: Explored) -> bool:
        return best.fits if self.any_that_fits else not needs_better(best)

    def _begin(self, stage: str, share: float | None = None) -> None:
        """Tell what is tried next, and what is in hand.

        Raises:
          DeadlinePassed: the time limit has passed, and a program is in hand.
        """
        if self.history.best is not None:
            self.deadline.check()
        self.notify(stage + self.history.standing, share)

    def _explore(self, proposal: Proposal) -> Explored:
        """By the latency-hiding scheduler if the program copies, then by the serial one.

        A program in slabs is scheduled by the first alone. A saved plan fits only the schedule that
        it was made for, and is compiled.
        """
        program = proposal.program
        commits = self._commits(proposal) if self.compiles else never
        if self.follow:
            commits = always
        self._begin(f"exploring {proposal.what}")
        planned_for = self.follow.hides_latency if self.follow else None
        if planned_for is not None:
            return self._within_limits(program, planned_for, commits)
        copies = copies_by_itself(program)
        best = self._within_limits(program, copies, commits)
        if not best.fits and copies and self.copies_overlap and not program.in_slabs:
            self._begin(f"exploring {proposal.what}, copies one after another")
            best = better(best, self._within_limits(program, False, commits))
        return best

    @staticmethod
    def _commits(proposal: Proposal) -> Commits:
        """The proposal's own rule; no program is compiled while the next one is out of time."""

        def commits(explored: Explored) -> bool:
            try:
                return proposal.commits(explored)
            except DeadlinePassed:
                return False

        return commits

    def _compiled(self, best: Explored) -> Outcome:
        if isinstance(best, Outcome):
            return best
        outcomes = list[Outcome]()
        fitting = sorted(self.history.fitting, key=lambda explored: explored.rank)
        for explored in fitting or [best]:
            self.history.summaries.remove(explored.summary)
            self.notify(f"compiling the best: {_figures(explored)}", None)
            program, hides_latency = explored.program, explored.hides_latency
            outcome = self._within_limits(program, hides_latency, always)
            if not isinstance(outcome, Outcome):  # refused, and asked for all the same
                outcome = self.compiler.compile(program, hides_latency)
                self.history.add(outcome)
            outcomes.append(outcome)
            if outcome.fits:
                break
        return min(outcomes, key=lambda outcome: outcome.rank)

    def _within_limits(self, program: Program, hides_latency: bool, commits: Commits) -> Explored:
        """By one of XLA's schedulers; compiled again with more headroom if a prediction was too
        low.

        It stops when the outcome fits, is predicted not to fit, or has used all tries.
        """
        headroom = Headroom()
        outcome = self._compile(program, hides_latency, headroom, commits)
        for _ in range(self.tries - 1):
            is_counted = isinstance(outcome, Outcome) or outcome.refused_bytes is not None
            is_done = not is_counted or outcome.fits or not outcome.planned.fits
            if is_done or self.follow is not None:
                break
            self.notify("compiling again, within what the first plan missed by", None)
            planned = outcome.planned
            predicted = planned.predicted_bytes, planned.predicted_host_bytes
            compiled = outcome.device_bytes, outcome.host_bytes
            headroom = headroom.after_miss(outcome.limits, predicted, compiled)
            outcome = self._compile(program, hides_latency, headroom, always)
        return outcome

    def _compile(
        self, program: Program, hides_latency: bool, headroom: Headroom, commits: Commits
    ) -> Explored:
        explored = self.compiler.explore(program, hides_latency, headroom, commits)
        self.history.add(explored)
        _log.debug("%s %s", "fits:" if explored.fits else "does not fit:", explored.summary)
        return explored


def _figures(explored: Explored) -> str:
    """Seconds and bytes of a program, as text."""
    return f"{format_seconds(explored.step_s)} in {format_bytes(explored.device_bytes)}"


def copies_by_itself(program: Program) -> bool:
    """Whether the program copies between host and device without a plan."""
    return any(transform.uses_host for transform in program.transforms)
