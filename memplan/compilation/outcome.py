"""A program, compiled under limits with its plan."""

import functools
from dataclasses import dataclass, replace

from memplan.compilation.callback import PlannedModule
from memplan.compilation.limits import Limits
from memplan.compilation.scheduled import ScheduledModule
from memplan.planning.plan import Plan, name_actions
from memplan.planning.schedule import runs
from memplan.program.trace import InSlabs, Program
from memplan.xla.collectives.unexpected import Gather
from memplan.xla.target import Executable, Target


@dataclass(frozen=True)
class SlabAttempt:
    """The bytes of a step that was compiled in slabs."""

    in_slabs: tuple[InSlabs, ...]  # the parts of the program in slabs
    # device_bytes, host_bytes: by the compiler
    device_bytes: int
    host_bytes: int
    excess_bytes: int  # above the limits


@dataclass(frozen=True)
class Compiled:
    """What a compilation of a step came to."""

    way: str  # as of `Outcome`
    # device_bytes, host_bytes: by the compiler
    device_bytes: int
    host_bytes: int
    step_s: float  # by the replay
    fits: bool


@dataclass(frozen=True)
class Restored:
    """A program that an earlier start planned and compiled, from jax's persistent cache."""

    program: Program
    target: Target
    executable: Executable
    plan: Plan | None
    report: str  # the JSON of the report of then
    fits: bool = True  # else it was not kept


@dataclass(frozen=True)
class Outcome:
    """A program compiled under limits."""

    program: Program  # the compiled program, transformed or not
    target: Target
    limits: Limits
    executable: Executable
    planned: PlannedModule  # the callback's results during the compilation
    unmodified: ScheduledModule | None  # the unmodified step; None if only its transformed program was compiled
    compilations: int  # number of compilations
    hides_latency: bool = False  # XLA's scheduler hid the latency of copies
    between_hosts: str | None = None  # the type in which sums travel there, if it is not their own
    gathers: tuple[Gather, ...] = ()  # that the user does not expect
    seconds: float = 0.0  # from the call to this outcome
    name: str = ""  # of the module in jax's persistent cache, if it is there
    others: tuple[Compiled, ...] = ()  # compilations of the step that were not taken, in order
    # among all slab attempts, the one closest to the limits
    closest_slab_attempt: SlabAttempt | None = None

    @property
    def device_bytes(self) -> int:
        return self.executable.memory.device_bytes

    @property
    def host_bytes(self) -> int:
        return self.executable.memory.host_bytes

    @property
    def fits(self) -> bool:
        return self.limits.allow(self.device_bytes, self.host_bytes)

    @property
    def way(self) -> str:
        """The name of its planner, or of what was enough without one; `plain` for the unmodified step."""
        program, plan = self.program, self.planned.plan
        if plan is None:
            return _transform_of(program) or "plain"
        transforms = (", in slabs" if program.in_slabs else "", ", fewer residuals" if any(program.residuals) else "")
        return plan.planner + "".join(transforms)

    @property
    def summary(self) -> Compiled:
        return Compiled(self.way, self.device_bytes, self.host_bytes, self.step_s, self.fits)

    @property
    def step_s(self) -> float:
        """Seconds of a step, by the replay."""
        return self.planned.result.replay.step_s

    @functools.cached_property
    def plan(self) -> Plan | None:
        """The plan that reproduces it; None for the unmodified step."""
        plan, program = self.planned.plan, self.program
        if plan is None:
            if (name := _transform_of(program)) is None:
                return None
            plain = self.planned.plain
            actions = name_actions(plain.problem, runs(range(len(plain.problem.kernels))))
            plan = Plan(actions, plain.module.fingerprint, name, self.target.device.name)
        slabs = tuple(one.slabs for one in program.in_slabs)
        module = self.planned.plain.module
        return replace(
            plan,
            loops=program.residuals,
            indexed_stacks=program.has_indexed_stacks,
            slabs=slabs,
            on_host=tuple(sorted(program.on_host)),
            program=program.original.digest,
            structure=module.structure,
            kernels=tuple(module.chosen_kernels.items()),
            hides_latency=self.hides_latency,
        )


def _transform_of(program: Program) -> str | None:
    """Which transform changed a program most; "none" where only its state moved, None for the step as it is."""
    if program.in_slabs:
        return "slabs"
    if any(program.residuals):
        return "residuals"
    return "none" if program.on_host or program.has_indexed_stacks else None
