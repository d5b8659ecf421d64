"""Results of compilations: explored or whole, a summary, a program restored from the cache."""

import functools
from dataclasses import dataclass, replace

from memplan.compilation.callback import PlannedModule
from memplan.compilation.limits import Limits, Rank, rank
from memplan.compilation.scheduled import ScheduledModule
from memplan.planning.plan import Plan, name_actions
from memplan.planning.schedule import runs
from memplan.program.trace import InSlabs, Program
from memplan.xla.collectives.unexpected import Gather
from memplan.xla.target import Executable, Target

# A program may fit if it is predicted to exceed the limit by 1/4096 of it, or 4 KiB, at most: XLA
# allocates somewhat less than predicted. In 188 rows of the bench none fitted that was predicted to
# exceed it; a step of 20 MiB took 712 bytes less.
_PREDICTION_SLACK = 4 << 10
_PREDICTION_PARTS = 1 << 12


@dataclass(frozen=True)
class SlabAttempt:
    """The size of a step in slabs."""

    in_slabs: tuple[InSlabs, ...]  # parts of the program that run in slabs
    device_bytes: int  # see `Explored.device_bytes`
    host_bytes: int
    excess_bytes: int  # bytes above the limits


@dataclass(frozen=True)
class ProgramSummary:
    """What one program of a step takes, compiled or explored."""

    method: str  # see `Explored.method`
    device_bytes: int  # see `Explored.device_bytes`
    host_bytes: int
    step_s: float  # seconds of a step, predicted by the replay
    fits: bool  # both limits are kept


@dataclass(frozen=True)
class Restored:
    """A program that an earlier start of the job compiled, from jax's persistent cache."""

    program: Program
    target: Target
    executable: Executable
    plan: Plan | None  # None for the unmodified step
    report: str  # the JSON of the earlier start's report
    fits: bool = True  # the cache has only steps that fit


@dataclass(frozen=True)
class Explored:
    """A program planned under limits, whose compilation may have ended there."""

    program: Program  # the program, transformed or not
    target: Target
    limits: Limits
    planned: PlannedModule  # the callback's result during the compilation
    hides_latency: bool  # scheduled by XLA's latency-hiding scheduler
    # the unmodified step's module; None if only a transformed program was explored
    unmodified: ScheduledModule | None = None
    # the smallest plan for the unmodified step that was found; None if none was explored
    smallest_unmodified: ProgramSummary | None = None
    # of all programs in slabs, the one that exceeds the limits least
    closest_slab_attempt: SlabAttempt | None = None
    refused_bytes: int | None = None  # by XLA's count, if that refused to compile it

    @property
    def is_compiled(self) -> bool:
        """Whether its bytes are XLA's; else they are predicted."""
        return isinstance(self, Outcome)

    @property
    def device_bytes(self) -> int:
        """As predicted; of an `Outcome`, as XLA allocates them."""
        refused_bytes = self.refused_bytes
        return self.planned.predicted_bytes if refused_bytes is None else refused_bytes

    @property
    def host_bytes(self) -> int:
        """As predicted; of an `Outcome`, as XLA allocates them."""
        return self.planned.predicted_host_bytes

    @property
    def constant_bytes(self) -> int:
        """Bytes of constants on the device."""
        return self.planned.plain.constant_bytes

    @property
    def fits(self) -> bool:
        """Whether it should fit; of an `Outcome`, whether it does."""
        if self.refused_bytes is not None:
            return False
        slack = min(_PREDICTION_SLACK, self.limits.device_bytes // _PREDICTION_PARTS)
        return self.limits.allow(self.device_bytes - slack, self.host_bytes)

    @property
    def method(self) -> str:
        """The planner and transforms; without a plan, the main transform or `plain`."""
        program = self.program
        plan = self.planned.plan
        workspace = ", less workspace" if program.asks_less_workspace else ""
        if plan is None:
            return (_main_transform(program) or "plain") + workspace
        slabs = ", in slabs" if program.in_slabs else ""
        residuals = ", fewer residuals" if program.loops else ""
        return plan.planner + slabs + residuals + workspace

    @property
    def summary(self) -> ProgramSummary:
        sizes = self.device_bytes, self.host_bytes
        return ProgramSummary(self.method, *sizes, self.step_s, self.fits)

    @property
    def rank(self) -> Rank:
        """The key by which `min` chooses among outcomes (`limits.rank`)."""
        actions = self.planned.result.replay.actions
        return rank(self.fits, self.step_s, self.device_bytes, actions)

    @property
    def step_s(self) -> float:
        """Seconds of a step, predicted by the replay."""
        return self.planned.result.replay.step_s


@dataclass(frozen=True, kw_only=True)
class Outcome(Explored):
    """A program compiled under limits."""

    executable: Executable
    compilations: int = 1  # number of compilations
    explorations: int = 0  # number of compilations that ended at the plan
    between_hosts: str | None = None  # element type of sums between hosts, if not their own
    gathers: tuple[Gather, ...] = ()  # gathers that the user does not expect
    seconds: float = 0.0  # seconds from the call to this outcome
    name: str = ""  # the module's name in jax's persistent cache; "" if it is not cached
    rejected: tuple[ProgramSummary, ...] = ()  # the step's other programs, in order
    # what ended the exploration (`compilation.deadline`), so that other programs may be faster; ""
    # if nothing did
    ended_by: str = ""

    @property
    def device_bytes(self) -> int:
        return self.executable.memory.device_bytes

    @property
    def host_bytes(self) -> int:
        return self.executable.memory.host_bytes

    @property
    def constant_bytes(self) -> int:
        return self.executable.memory.constant_bytes

    @property
    def fits(self) -> bool:
        return self.limits.allow(self.device_bytes, self.host_bytes)

    @functools.cached_property
    def plan(self) -> Plan | None:
        """The plan that reproduces the outcome; None for the unmodified step."""
        program = self.program
        plain = self.planned.plain
        module = plain.module
        plan = self.planned.plan
        if plan is None:
            if (transform := _main_transform(program)) is None:
                return None
            actions = name_actions(plain.problem, runs(range(len(plain.problem.kernels))))
            plan = Plan(actions, module.fingerprint, transform, self.target.device.name)
        return replace(
            plan,
            transforms=program.transforms,
            program=program.original.digest,
            structure=module.structure,
            kernels=tuple(module.chosen_kernels.items()),
            hides_latency=self.hides_latency,
        )


def _main_transform(program: Program) -> str | None:
    """The transform that changed a program most.

    "none" if only state or stacks changed; None for the unmodified program.
    """
    if program.in_slabs:
        return "slabs"
    if program.loops:
        return "residuals"
    return "none" if program.transforms else None
