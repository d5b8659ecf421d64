"""XLA with a plan in its middle: one program compiled once, for a target, under limits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from memplan.compilation.callback import Callback
from memplan.compilation.limits import Headroom, Limits
from memplan.compilation.outcome import Outcome
from memplan.compilation.scheduled import Agree
from memplan.compilation.shaping import Shaping, collective_flags
from memplan.planning.plan import Plan
from memplan.planning.registry import Planner
from memplan.program import compat
from memplan.program.lowerable import lowerable
from memplan.program.trace import Program
from memplan.verify.numbers import check_types
from memplan.xla.collectives.unexpected import Gather
from memplan.xla.hook import Rewrite
from memplan.xla.module import read_module
from memplan.xla.replay import Replay, replay
from memplan.xla.target import HIDES_LATENCY, Executable, Target
from memplan.xla.write import as_it_stands

Notify = Callable[[str, float | None], None]
Profile = Mapping[str, float]
"""Seconds by the names of instructions."""


@dataclass(frozen=True)
class Compiler:
    """Programs of one step, for a target."""

    target: Target
    limits: Limits  # of the whole step
    planner: Planner  # makes the plan; `follow`: one to carry out instead
    follow: Plan | None
    agree: Agree  # brings all processes of the step to one plan
    notify: Notify
    between_hosts: str | None = None  # the type in which sums travel there, if it is not their own

    def compile(
        self,
        program: Program,
        profile: Profile | None = None,
        hides_latency: bool = False,
        headroom: Headroom = Headroom(),
    ) -> Outcome:
        """Compile with a plan in the middle, where the program does not fit as it is.

        Args:
          profile: see `profile`.
          hides_latency: XLA's scheduler begins what is copied long before it is read, and so holds more.
          headroom: is left free: what an earlier compilation took beyond its prediction.

        Raises:
          WrongProgramError: the program is transformed, and has not the step's types.
        """
        if program.rewritten is not None:
            check_types(program.traced.jaxpr, program.rewritten)
        callback = Callback(
            self.target.device,
            self.limits,
            headroom,
            program.machine,
            self.planner,
            self.follow,
            self.agree,
            overlap_loop_copies=bool(program.in_slabs) and self.target.is_gpu,
            program=program.original.digest if self.follow else "",
        )
        executable, gathers = self._compile(program, callback, profile, hides_latency)
        return Outcome(
            program,
            self.target,
            self.limits,
            executable,
            callback.planned,
            unmodified=callback.planned.plain if program.rewritten is None else None,
            compilations=1,
            hides_latency=hides_latency,
            between_hosts=self.between_hosts,
            gathers=gathers,
        )

    def profile(self, program: Program) -> Profile | None:
        """Seconds of every instruction of a step with collectives, by a separate compilation; None without collectives.

        XLA's scheduler guesses from the size of a message what a collective takes, and lets it wait. A profile goes by
        the names that instructions have from fusion on, and XLA calls nobody back between fusion and scheduling.
        """
        if program.machine is None or not self.target.is_gpu:
            return None
        self.notify("compiling for the seconds of its collectives", None)
        found: list[Replay] = []

        def read(text: str) -> None:
            found.append(replay(text, self.target.device, program.machine))

        self._compile(program, read, None, hides_latency=False, runs=False)
        return found[0].seconds if found[0].collectives else {}

    def _compile(
        self, program: Program, rewrite: Rewrite, profile: Profile | None, hides_latency: bool, runs: bool = True
    ) -> tuple[Executable, tuple[Gather, ...]]:
        """The program compiled, and its unexpected gathers."""
        early = HIDES_LATENCY if self.target.is_gpu and (hides_latency or program.in_slabs) else {}
        if program.machine is None:
            return compile_program(program, self.target, early, profile, rewrite), ()
        asked = compat.asked_sizes(program.traced.jaxpr)
        shaping = Shaping(program.machine, self.target.is_gpu, self.between_hosts, asked, runs)
        found = _compile_shaped(program, self.target, shaping, early, profile, rewrite)
        return found, shaping.gathers


def compile_unplanned(found: Outcome) -> Executable:
    """Compile the unmodified step of an outcome without a plan, but with the collectives that its plan has.

    These add in another order than those that `jax.jit` would have. On one device, the step is that of `jax.jit`.
    """
    program, target = found.program.original, found.target
    if program.machine is None:
        return compile_program(program, target)
    shaping = Shaping(program.machine, target.is_gpu, found.between_hosts)
    return _compile_shaped(program, target, shaping, {}, None, lambda text: None)


def _compile_shaped(
    program: Program,
    target: Target,
    shaping: Shaping,
    flags: Mapping[str, Any],
    profile: Profile | None,
    rewrite: Rewrite,
) -> Executable:
    """Compile a program over several devices, with its collectives shaped before `rewrite` is called."""

    def with_lines(text: str) -> str | None:
        told = shaping.with_lines(text)
        return rewrite(told) or (None if told is text else as_it_stands(read_module(told)))

    flags = {**collective_flags(shaping.machine, shaping.on_gpu), **flags}
    return compile_program(program, target, flags, profile, with_lines, shaping)


def compile_program(
    program: Program,
    target: Target,
    flags: Mapping[str, Any] | None = None,
    profile: Profile | None = None,
    rewrite: Rewrite | None = None,
    shape: Rewrite | None = None,
) -> Executable:
    """Compile a program for a target; without `rewrite`, as `jax.jit` does by default. See `Target.compile`."""
    return target.compile(lowerable(program, target.is_gpu), flags, profile, rewrite, shape)


def shapes_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """The arguments without their arrays, so that a plan does not keep a whole training state alive."""

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
