"""Compiles one program for a target under limits, and plans it inside XLA."""

import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax

from memplan.compilation.callback import Callback, PlannedModule
from memplan.compilation.kept import Kept
from memplan.compilation.limits import Headroom, Limits
from memplan.compilation.outcome import Explored, Outcome, Restored
from memplan.compilation.scheduled import Agree, ScheduledModule
from memplan.compilation.shaping import Shaping, collective_flags
from memplan.errors import MemplanError
from memplan.planning.plan import Plan
from memplan.planning.registry import Planner
from memplan.planning.transforms import Transform
from memplan.program import compat
from memplan.program.lowerable import lowerable
from memplan.program.trace import Program
from memplan.units import show_bytes
from memplan.verify.numbers import check_types
from memplan.xla.collectives.unexpected import Gather
from memplan.xla.hook import Rewrite, Stopped
from memplan.xla.module import Module
from memplan.xla.platform import OverLimitError
from memplan.xla.target import HIDES_LATENCY, Executable, Target
from memplan.xla.workspace import timing_options, with_less_workspace

Notify = Callable[[str, float | None], None]
Commits = Callable[[Explored], bool]
"""Whether a planned program is compiled. It is called in a thread of XLA's."""
Modules = dict[tuple[tuple[Transform, ...], bool], ScheduledModule]
"""What XLA scheduled for the programs of one step, by transforms and `hides_latency`. No limit
changes it, but of a back end that `packs_again`, whose modules are not kept."""


def always(explored: Explored) -> bool:
    """Compile every program (`Commits`)."""
    return True


def never(explored: Explored) -> bool:
    """Compile no program (`Commits`)."""
    return False


@dataclass(frozen=True)
class Compiler:
    """Compiles programs of one step for a target."""

    target: Target
    limits: Limits  # of the whole step
    planner: Planner  # makes the plan if `follow` is None
    follow: Plan | None  # a saved plan to follow
    agree: Agree  # makes all processes of the step use one plan
    notify: Notify
    between_hosts: str | None = None  # element type of sums between hosts, if not their own
    key: str = ""  # cache key of everything a plan depends on; "" if the step is not cached
    # grows by every program that is explored; those in it are explored again without XLA
    modules: Modules | None = None
    # numbers in the names of cached modules
    numbers: Iterator[int] = field(default_factory=itertools.count)
    # plans by the module and all other inputs, so that a program that is explored and then compiled
    # is planned once
    _plans: dict[tuple[str, str], Plan] = field(default_factory=dict)

    def compile(
        self,
        program: Program,
        hides_latency: bool = False,
        headroom: Headroom = Headroom(),
    ) -> Outcome:
        """Compile the program; if it does not fit unplanned, plan it during the compilation.

        See `explore`.
        """
        outcome = self.explore(program, hides_latency, headroom, always, is_limited=False)
        assert isinstance(outcome, Outcome)
        return outcome

    def explore(
        self,
        program: Program,
        hides_latency: bool,
        headroom: Headroom,
        commits: Commits,
        is_limited: bool = True,
    ) -> Explored:
        """Plan the program during its compilation, which ends there if `commits` returns False.

        Args:
          hides_latency: XLA's scheduler starts copies long before their readers, and uses more
            memory.
          headroom: bytes left unused, by which an earlier compilation exceeded its prediction.
          commits: whether XLA compiles the planned program; with `never`, XLA schedules it only
            if it is not in `modules`.
          is_limited: XLA may refuse the planned program if it packs that into more than the limit.

        Returns:
          An `Outcome` if it was compiled.

        Raises:
          WrongProgramError: a transform changed the step's input or output types.
        """
        if program.rewritten is not None:
            check_types(program.traced.jaxpr, program.rewritten)

        def explored(planned: PlannedModule) -> Explored:
            return Explored(program, self.target, self.limits, planned, hides_latency)

        callback = self._callback(program, headroom)
        callback.commits = lambda planned: commits(explored(planned))
        key = program.transforms, hides_latency
        modules = None if self.target.backend.packs_again else self.modules
        if commits is never and modules and key in modules:
            return explored(callback.plan(modules[key]))
        while True:
            is_cached = self.key and not program.asks_less_workspace
            name = f"{self.key}_{next(self.numbers)}" if is_cached else ""
            try:
                executable, gathers = self._compile(
                    program, callback, hides_latency, name, is_limited
                )
            except Stopped:
                if modules is not None:
                    modules[key] = callback.plain
                return explored(callback.planned)
            except OverLimitError as refusal:
                refused_bytes = refusal.device_bytes
                if not is_limited:
                    device = self.target.device
                    raise MemplanError(
                        f"XLA does not compile the step for {device.name}: as planned it takes "
                        f"{show_bytes(refused_bytes)}, and XLA lets a program take "
                        f"{show_bytes(device.memory_bytes)}. Try a smaller budget, batch or image."
                    ) from None
                return replace(explored(callback.planned), refused_bytes=refused_bytes)
            # jax may have an executable of this name, whose plan is lost: try the next one
            if callback.was_called or not self.key:
                return self._outcome(program, executable, callback, hides_latency, gathers, name)

    def restore(self, program: Program, kept: Kept) -> Outcome | Restored:
        """The executable of an earlier start; if jax has dropped it, compiled again by the saved
        plan.
        """
        callback = self._callback(program, Headroom())
        executable, gathers = self._compile(program, callback, kept.hides_latency, kept.name)
        if callback.was_called:
            return self._outcome(
                program, executable, callback, kept.hides_latency, gathers, kept.name
            )
        return Restored(program, self.target, executable, self.follow, kept.report)

    def _callback(self, program: Program, headroom: Headroom) -> Callback:
        return Callback(
            self.target.device,
            self.limits,
            headroom,
            program.machine,
            self.planner,
            self.follow,
            self._agree_once,
            overlap_loop_copies=bool(program.in_slabs) and self.target.backend.has_own_memory,
            program=program.original.digest if self.follow else "",
            pins=program.pins,
        )

    def _agree_once(self, fingerprint: str, key: str, make: Callable[[], Plan]) -> Plan:
        """The plan that all processes of the step follow, made once (`Agree`)."""
        if (fingerprint, key) not in self._plans:
            self._plans[fingerprint, key] = self.agree(fingerprint, key, make)
        return self._plans[fingerprint, key]

    def _outcome(
        self,
        program: Program,
        executable: Executable,
        callback: Callback,
        hides_latency: bool,
        gathers: tuple[Gather, ...],
        name: str,
    ) -> Outcome:
        return Outcome(
            program,
            self.target,
            self.limits,
            callback.planned,
            hides_latency,
            executable=executable,
            unmodified=None if program.transforms else callback.planned.plain,
            between_hosts=self.between_hosts,
            gathers=gathers,
            name=name,
        )

    def _compile(
        self,
        program: Program,
        rewrite: Rewrite,
        hides_latency: bool,
        name: str = "",
        is_limited: bool = True,
    ) -> tuple[Executable, tuple[Gather, ...]]:
        """The program compiled, and its unexpected gathers; see `Target.compile`."""
        overlaps = self.target.backend.overlaps_collectives and (hides_latency or program.in_slabs)
        flags = HIDES_LATENCY if overlaps else {}
        if program.machine is None:
            if program.asks_less_workspace:
                return _compile_with_less_workspace(program, self.target, flags, rewrite), ()
            limit_bytes = self.limits.device_bytes if is_limited else None
            return compile_program(
                program, self.target, flags, rewrite, None, name, limit_bytes
            ), ()
        expected_sizes = compat.constrained_sizes(program.traced.jaxpr)
        shaping = Shaping(program.machine, self.target.backend, self.between_hosts, expected_sizes)
        executable = _compile_shaped(program, self.target, shaping, flags, rewrite)
        return executable, shaping.gathers


def compile_unplanned(outcome: Outcome) -> Executable:
    """Compile the unmodified step of an outcome unplanned, but with the collectives of the plan.

    They add in another order than the collectives of `jax.jit`. On one device, the step is that of
    `jax.jit`.
    """
    program, target = outcome.program.original, outcome.target
    if program.machine is None:
        return compile_program(program, target)
    shaping = Shaping(program.machine, target.backend, outcome.between_hosts)
    return _compile_shaped(program, target, shaping, {}, lambda module: None)


def _compile_with_less_workspace(
    program: Program, target: Target, flags: Mapping[str, Any], rewrite: Rewrite
) -> Executable:
    """Compile a program; choose algorithms with less workspace before calling `rewrite`."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "autotuner.log"

        def rewrite_smaller(scheduled: Module) -> Module | None:
            module = with_less_workspace(scheduled, log.read_text() if log.exists() else "")
            rewritten = rewrite(module)
            return module if rewritten is None and module is not scheduled else rewritten

        users = program.options.get("compiler_options") or {}
        own = {name: value for name, value in timing_options(log).items() if name not in users}
        return compile_program(program, target, {**own, **flags}, rewrite_smaller)


def _compile_shaped(
    program: Program,
    target: Target,
    shaping: Shaping,
    flags: Mapping[str, Any],
    rewrite: Rewrite,
) -> Executable:
    """Compile a program for several devices; shape its collectives before calling `rewrite`."""
    flags = {**collective_flags(shaping.machine, shaping.backend), **flags}
    return compile_program(program, target, flags, rewrite, shaping)


def compile_program(
    program: Program,
    target: Target,
    flags: Mapping[str, Any] | None = None,
    rewrite: Rewrite | None = None,
    shape: Rewrite | None = None,
    name: str = "",
    limit_bytes: int | None = None,
) -> Executable:
    """Compile a program for a target; without `rewrite`, as `jax.jit` does by default. See
    `Target.compile`.
    """
    to_lower = lowerable(program, target.backend)
    return target.compile(to_lower, flags, rewrite, shape, name, limit_bytes)


def shapes_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """Shapes in place of arrays, so that a plan does not keep a whole training state alive."""

    def shape(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        return jax.ShapeDtypeStruct(
            leaf.shape,
            leaf.dtype,
            weak_type=getattr(leaf, "weak_type", False),
            sharding=leaf.sharding if leaf.committed else None,
        )

    return jax.tree.map(shape, (tuple(args), dict(kwargs)))
