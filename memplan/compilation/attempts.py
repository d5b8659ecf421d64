"""The order in which the programs of a step are compiled, and the choice of an outcome.

memplan compiles one program after another until one fits: the step itself, the step with loops that
read their stacks by index, with as few residuals fewer as needed, and with parts in slabs. A
program that copies is compiled by XLA's latency-hiding scheduler first, then by the serial one,
which uses less memory. Where a compilation exceeds its prediction, the program is compiled again
with a budget that is lower by the excess. A plan that fits but is slow is compared with the other
programs.
"""

from dataclasses import dataclass, field, replace

from memplan.compilation.compiler import Compiler, Notify, Profile
from memplan.compilation.limits import Headroom
from memplan.compilation.outcome import CompilationSummary, Outcome, SlabAttempt
from memplan.compilation.scheduled import ScheduledModule
from memplan.compilation.variants import Proposals, Variants, better, needs_better
from memplan.planning.plan import Plan
from memplan.program.candidates import Candidates
from memplan.program.trace import Program

# Compile one program by one schedule at most this often. Each time corrects the last prediction.
MOST_TRIES = 3


@dataclass
class _History:
    """All compilations of a step."""

    profiles: int = 0  # compilations that only measure collectives
    # the first compilation's module, if its program was unmodified
    unmodified: ScheduledModule | None = None
    # of all compilations in slabs, the one that exceeds the limits least
    closest_slab_attempt: SlabAttempt | None = None
    # of all compilations but profiles, in order
    summaries: list[CompilationSummary] = field(default_factory=list)

    @property
    def compilations(self) -> int:
        return self.profiles + len(self.summaries)

    def add(self, outcome: Outcome) -> None:
        if not self.summaries:
            self.unmodified = outcome.unmodified
        self.summaries.append(outcome.summary)
        if outcome.program.in_slabs:
            sizes = outcome.device_bytes, outcome.host_bytes
            attempt = SlabAttempt(outcome.program.in_slabs, *sizes, outcome.limits.excess(*sizes))
            closest = self.closest_slab_attempt
            if closest is None or attempt.excess_bytes < closest.excess_bytes:
                self.closest_slab_attempt = attempt


@dataclass(frozen=True)
class Attempts:
    """Compiles the programs of one step until one fits."""

    compiler: Compiler
    candidates: Candidates
    notify: Notify
    follow: Plan | None = None  # a saved plan to follow; no other program is compiled
    tries: int = MOST_TRIES  # most compilations of one program by one schedule
    copies_overlap: bool = True  # the target runs copies and kernels at the same time
    history: _History = field(default_factory=_History)  # what `run` has compiled

    def run(self, program: Program) -> Outcome:
        """The first outcome that fits, a faster one if that is slow, or the smallest if none
        fits.
        """
        best = self._compile_schedules(program)
        if self.follow is None:
            variants = Variants(self.candidates, self.notify, self.tries)
            unmodified = self.history.unmodified
            best = self._best_of(best, variants.indexed_stacks(best))
            best = self._best_of(best, variants.fewer_residuals(best, unmodified))
            best = self._best_of(best, variants.in_slabs(best))
        rejected = self.history.summaries.copy()
        rejected.remove(best.summary)
        return replace(
            best,
            rejected=tuple(rejected),
            unmodified=self.history.unmodified,
            compilations=self.history.compilations,
            closest_slab_attempt=self.history.closest_slab_attempt,
        )

    def _best_of(self, best: Outcome, proposals: Proposals[None]) -> Outcome:
        """The best outcome, also of the proposed programs, if a better one is needed."""
        if not needs_better(best):
            return best
        program = next(proposals, None)
        while program is not None:
            outcome = self._compile_schedules(program)
            best = better(best, outcome)
            try:
                program = proposals.send(outcome)
            except StopIteration:
                program = None
        return best

    def _compile_schedules(self, program: Program) -> Outcome:
        """Compile by the latency-hiding scheduler if the program copies, then by the serial one.

        A program in slabs is compiled by the first alone. A saved plan fits only the schedule that
        it was made for.
        """
        profile = self.compiler.profile(program)
        self.history.profiles += profile is not None
        planned_for = self.follow.hides_latency if self.follow else None
        if planned_for is not None:
            return self._compile_within_limits(program, profile, planned_for)
        copies = copies_by_itself(program)
        best = self._compile_within_limits(program, profile, hides_latency=copies)
        if not best.fits and copies and self.copies_overlap and not program.in_slabs:
            self.notify("compiling again, its copies one after another", None)
            serial = self._compile_within_limits(program, profile, hides_latency=False)
            best = better(best, serial)
        return best

    def _compile_within_limits(
        self, program: Program, profile: Profile | None, hides_latency: bool
    ) -> Outcome:
        """Compile by one of XLA's schedulers, again with more headroom if a prediction was too low.

        It stops when the outcome fits, is predicted not to fit, or has used all tries.
        """
        self.notify("compiling", None)
        headroom = Headroom()
        outcome = self._compile(program, profile, hides_latency, headroom)
        for _ in range(self.tries - 1):
            if outcome.fits or not outcome.planned.fits or self.follow is not None:
                break
            self.notify("compiling again, within what the first plan missed by", None)
            sizes = outcome.device_bytes, outcome.host_bytes
            headroom = headroom.plus_overshoot(outcome.limits, *sizes)
            outcome = self._compile(program, profile, hides_latency, headroom)
        return outcome

    def _compile(
        self, program: Program, profile: Profile | None, hides_latency: bool, headroom: Headroom
    ) -> Outcome:
        outcome = self.compiler.compile(program, profile, hides_latency, headroom)
        self.history.add(outcome)
        return outcome


def copies_by_itself(program: Program) -> bool:
    """Whether the program copies between host and device without a plan."""
    return any(transform.uses_host for transform in program.transforms)
