"""A step, as it is or as it is planned, by the compiler; and what the compiler says of its segments."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from memplan import guided
from memplan.candidates import Candidate
from memplan.planning.graph import Graph
from memplan.planning.loop import moved_nbytes
from memplan.planning.plan import Plan
from memplan.planning.simulate import Simulator, Timeline
from memplan.planning.straight import straight
from memplan.planning.tidy import tidied
from memplan.program import compat
from memplan.program.executor import compile_stages
from memplan.program.extract import extract
from memplan.program.rewrite import rewrite
from memplan.program.targets import Target
from memplan.program.trace import Program, as_step
from memplan.verify.collectives import differing
from memplan.verify.effect import Effect, effect
from memplan.verify.plan import judge
from memplan.verify.program import check_types
from memplan.xla.traffic import Traffic


def compile_plain(
    program: Program,
    target: Target,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    compiler_options: Mapping[str, Any] | None = None,
    name: str = "plain",
    with_schedule: bool = False,
) -> Candidate:
    """The unmodified step, by the compiler; `with_schedule` asks for its memory over time too."""
    mesh = target.mesh_for(program.spmd)
    step = program.step if mesh is None else as_step(program, program.jaxpr, mesh)
    compiled, moved = guided.compiled(
        program, target, step, args, kwargs, compiler_options, with_schedule=with_schedule
    )
    memory = compiled.memory
    step_s = moved.step_s if moved else None
    return Candidate(
        name, memory.device_bytes, memory.host_bytes, step_s, memory.device_bytes, traffic=moved, executable=compiled,
        compiler_options=dict(compiler_options or {}), strange=strange(program, moved),
    )  # fmt: skip


@dataclass
class Unmodified:
    """The unmodified step with its schedule, compiled once and not before it is asked for."""

    program: Program
    target: Target
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    compiled: Candidate | None = field(default=None, init=False)

    def __call__(self) -> Candidate:
        if self.compiled is None:
            self.compiled = compile_plain(self.program, self.target, self.args, self.kwargs, with_schedule=True)
        return self.compiled


def strange(program: Program, moved: Traffic | None, planned: compat.ClosedJaxpr | None = None) -> tuple[str, ...]:
    """Collectives of an executable that are not those of what it was made from, the step as it is or planned."""
    if program.spmd is None or moved is None:
        return ()
    return differing(planned or program.jaxpr, program.spmd.axes, moved.collectives)


@dataclass(frozen=True)
class Compiling:
    """A step on a device: what plans are compiled of, and for.

    Attributes:
      program: to be planned, its loops and its state rewritten or not.
      plain: the step as it came.
    """

    program: Program
    plain: Unmodified

    @functools.cached_property
    def graph(self) -> Graph:
        return extract(self.program)

    @property
    def target(self) -> Target:
        return self.plain.target

    @functools.cached_property
    def straight(self) -> Plan:
        """One segment, the rest left to the compiler."""
        return straight(self.graph, self.target.device.name)

    @functools.cached_property
    def straight_timeline(self) -> Timeline:
        """What `straight` is predicted to be like."""
        return self.simulated(self.straight)

    def simulated(self, plan: Plan, slack: Mapping[int, int] | None = None) -> Timeline:
        return Simulator(self.graph, self.target.device, slack or {}).run(plan)

    def planned(self, plan: Plan, predicted: int, flags: Mapping[str, Any] | None = None) -> Candidate:
        """Judge a plan, rewrite, compile; `predicted` are its device bytes by the simulator."""
        plan = self.whole(plan)
        judge(plan, self.graph)
        if not self.target.is_gpu:
            timeline = self.simulated(plan)
            flags = dict(self.program.options.get("compiler_options") or {}) or None
            stages = compile_stages(self.program, self.graph, plan, flags)
            return Candidate(
                plan.planner, stages.peak_nbytes, 0, timeline.step_s, predicted, plan, stages=stages,
                program=self.program, graph=self.graph,
            )  # fmt: skip
        rewritten = self.rewritten(plan)
        compiled, moved = guided.compiled(
            self.program,
            self.target,
            as_step(self.program, rewritten, self.target.mesh_for(self.program.spmd)),
            self.plain.args,
            self.plain.kwargs,
            flags,
            with_schedule=True,
            held=self.program.held,
        )
        assert moved is not None
        memory = compiled.memory
        text = compiled.text
        return Candidate(
            plan.planner, memory.device_bytes, memory.host_bytes, moved.step_s, predicted, plan, compiled,
            compiler_options=dict(flags or {}), program=self.program, graph=self.graph,
            effect=self.effect(plan, text, moved), traffic=moved, strange=strange(self.program, moved, rewritten),
        )  # fmt: skip

    def effect(self, plan: Plan, hlo: str, moved: Traffic) -> Effect:
        def plain_flops() -> float:
            plain = self.plain().traffic
            return plain.flops if plain else 0.0

        useful = tidied(plan, self.graph)
        return effect(useful, self.graph, self.program.loops, hlo, moved.copies, moved.flops, plain_flops)

    def whole(self, plan: Plan) -> Plan:
        """A planner's actions, with what the program already is: its loops, its state on the host."""
        return replace(plan, loops=self.program.residuals, held=tuple(sorted(self.program.held)))

    def rewritten(self, plan: Plan) -> compat.ClosedJaxpr:
        jaxpr = rewrite(self.program, self.graph, plan)
        check_types(self.program.jaxpr, jaxpr)
        return jaxpr

    def believed(self, plan: Plan, timeline: Timeline, gap_s: float | None = None) -> Candidate:
        """A plan that nobody compiles."""
        device = timeline.peak_nbytes
        inputs = self.program.jaxpr.jaxpr.invars
        held = sum(compat.nbytes_of(inputs[position].aval) for position in self.program.held)
        host = timeline.host_peak_nbytes + held + sum(moved_nbytes(*known) for known in self.program.loops)
        return Candidate(
            plan.planner, device, host, timeline.step_s, device, self.whole(plan), gap_s=gap_s,
            program=self.program, graph=self.graph,
        )  # fmt: skip


def bytes_by_segment(candidate: Candidate) -> dict[int, int]:
    """Device bytes by segment of the plan, as far as the compiler tells."""
    if candidate.stages is not None:
        return dict(enumerate(candidate.stages.peak_by_segment))
    assert candidate.executable is not None
    schedule, memory = candidate.executable.schedule, candidate.executable.memory
    if schedule is None:
        return {}
    return {segment: memory.resident_bytes + nbytes for segment, nbytes in schedule.segment_peaks().items()}
