"""A scheduled module with its problem, seconds and bytes, its rewrites, and plans for it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from memplan.compilation import kept
from memplan.compilation.limits import Rank, rank
from memplan.hardware.device import Device
from memplan.hardware.machine import Machine
from memplan.hardware.roofline import copy_seconds
from memplan.planning.packing import Lifetime, Packing, lifetimes, live_nbytes, pack
from memplan.planning.plan import Feeding, Plan, name_actions
from memplan.planning.problem import POINTER_BYTES, Pin, Problem, Role
from memplan.planning.registry import Planner
from memplan.planning.schedule import Solution
from memplan.planning.search.planner import recomputed_kernels
from memplan.xla.buffers import problem_of
from memplan.xla.collectives.cost import is_collective
from memplan.xla.module import Module
from memplan.xla.overlap import Overlap
from memplan.xla.pins import with_pins
from memplan.xla.replay import Replay, replay
from memplan.xla.rewrites.extra_outputs import add_outputs, output_costs
from memplan.xla.rewrites.inline import inline_producers
from memplan.xla.rewrites.late_fills import fill_late
from memplan.xla.rewrites.merge import merge_fusions
from memplan.xla.rewrites.split import split_fusions
from memplan.xla.settle_pairs import settle_pairs
from memplan.xla.workspace import largest_algorithm_workspace, workspace_nbytes

# Accept a plan with extra outputs if it takes at most 1.1 times the plain step; else also plan
# without. Where the packing has large holes, extra outputs can cost more than they save: ResNet-50
# at 30 % took 175 ms with them and 144 without, the 3D U-Net in bfloat16 at half its bytes 2.9 ms
# and 2.6.
_EXTRA_OUTPUTS_RATIO = 1.1
# Plans are made with copies that take 1.25 times their seconds: as long as beside kernels that take
# 20 % less than predicted. Of seven plans of the bench, those made with copies as predicted took 6
# to 14 points more over plain beside such kernels (at 50 %: ResNet-50 on a V100 1.9 -> 13.8, a
# decoder on an H100 9.7 -> 17.1); these take as much as beside kernels as predicted, there -1.6 to
# 0.8 points more than the former.
_COPY_MARGIN = 1.25
Agree = Callable[[str, str, Callable[[], Plan]], Plan]
"""(module's fingerprint, key of all other inputs, function that plans) -> all processes' plan."""


@dataclass(frozen=True)
class Plans:
    """Plans for one module."""

    plain: ScheduledModule
    budget_bytes: int  # of the whole step, on the device
    host_bytes: int  # for offloaded values
    planner: Planner

    def agree(self, agree: Agree) -> Plan:
        """The plan that all processes of the step follow."""
        plain = self.plain
        fingerprint = plain.module.fingerprint
        limits = self.budget_bytes, self.host_bytes
        facts = fingerprint, self.planner.name, *limits, plain.device, plain.machine, plain.pins
        return agree(fingerprint, kept.digest(*facts), self.make)

    def make(self) -> Plan:
        """The fastest plan within the budget; if none fits, the smallest.

        If the smallest fits, a plan with its split kernels is made for the budget, too. The
        smallest is the same for every budget, so that all errors name the same smallest budget
        that works.
        """
        plain = self.plain
        budget_nbytes = self.budget_bytes - plain.resident_bytes
        extra = self._extra_outputs(plain.rewrite(budget_nbytes, whole=True), budget_nbytes)
        candidates = [self._plan(budget_nbytes, budget_nbytes, extra)] if extra else []
        slow_s = _EXTRA_OUTPUTS_RATIO * plain.replay.step_s
        if (
            not candidates
            or not candidates[0].solution.fits
            or candidates[0].solution.seconds > slow_s
        ):
            candidates.append(self._plan(budget_nbytes, budget_nbytes))
        best = min(candidates, key=lambda candidate: candidate.rank(candidate.solution.fits))
        if best.solution.fits:
            return best.plan
        if plain.waits:  # with every collective counted in full, there is time for more copies
            return replace(self, plain=replace(plain, waits={})).make()
        candidates = [self._plan(0, 0)]
        if candidates[0].solution.nbytes <= budget_nbytes:
            candidates.append(self._plan(0, budget_nbytes))
        return min(
            candidates, key=lambda plan: plan.rank(plan.solution.nbytes <= budget_nbytes)
        ).plan

    def _plan(
        self, rewrite_nbytes: int, budget_nbytes: int, extra: Sequence[str] = ()
    ) -> _PlanCandidate:
        """A plan within a budget for temporaries, for the module rewritten for `rewrite_nbytes`."""
        device = self.plain.device
        fingerprint = self.plain.module.fingerprint
        copy_s = functools.partial(_copy_s, device=device) if self.host_bytes > 0 else None
        problem = self.plain.rewrite(rewrite_nbytes, extra).timed_problem
        for key, earlier in self._solutions:
            if key == (budget_nbytes, problem):
                solution = earlier
                break
        else:
            solution = self.planner.plan(problem, budget_nbytes, self.host_bytes, copy_s)
            self._solutions.append(((budget_nbytes, problem), solution))
        plan = Plan(
            name_actions(problem, solution.schedule),
            fingerprint,
            self.planner.name,
            device.name,
            rewritten_for_nbytes=rewrite_nbytes,
            overlapped=self.plain.overlapped,
            budget_bytes=self.budget_bytes,
            extra_outputs=tuple(extra),
            pins=self.plain.pins,
        )
        return _PlanCandidate(plan, solution)

    @functools.cached_property
    def _solutions(self) -> list[tuple[tuple[int, Problem], Solution]]:
        """By budget and problem: rewritten for another budget, a module often stays the same."""
        return []

    def _extra_outputs(self, base: ScheduledModule, budget_nbytes: int) -> Sequence[str]:
        """Values that a first plan recomputes if recomputation costs as much as an extra output."""
        if not base.device.backend.merges_fusions:
            return ()
        problem = base.timed_problem
        shares = output_costs(base.module, problem, budget_nbytes, live_nbytes(problem).tolist())
        if not shares:
            return ()
        makers = {buffer.name: buffer.maker for buffer in problem.buffers if buffer.name in shares}
        kernel_shares = {makers[name]: share for name, share in shares.items()}
        kernels = tuple(
            replace(kernel, seconds=kernel.seconds * kernel_shares.get(number, 1.0))
            for number, kernel in enumerate(problem.kernels)
        )
        recomputed = recomputed_kernels(replace(problem, kernels=kernels), budget_nbytes)
        return [name for name in shares if makers[name] in recomputed]


def _copy_s(nbytes: int, device: Device) -> float:
    """Seconds of a copy that plans count with."""
    return _COPY_MARGIN * copy_seconds(nbytes, device)


@dataclass(frozen=True)
class _PlanCandidate:
    """A plan, and the planner's solution that it is made from."""

    plan: Plan
    solution: Solution

    def rank(self, fits: bool) -> Rank:
        solution = self.solution
        return rank(fits, solution.seconds, solution.nbytes, len(solution.schedule))


@dataclass(frozen=True)
class ScheduledModule:
    """A scheduled module, unmodified or planned."""

    module: Module
    device: Device
    machine: Machine | None = None  # the machine of the device
    pins: tuple[Pin, ...] = ()  # of the step, in the order of their marks
    # seconds that kernels wait for a collective, by the name of its start; rewrites keep them
    waits: Mapping[str, float] = field(default_factory=dict, compare=False)
    # the limit that its order is for: `Plan.overlapped`
    overlapped: tuple[int, Feeding] | None = None

    def overlap(self, limit_nbytes: int, feeding: Feeding = "") -> ScheduledModule:
        """Overlap collectives with more kernels (`Overlap.order`); the module itself if none
        moves.

        If kernels move, collectives move again in the new order where that is faster: for an FSDP
        decoder of 8 layers on 2 x 4 A100s 58.7 ms instead of 60.5.
        """
        ordered = self._ordered(limit_nbytes, feeding)
        if not feeding:
            return ordered
        again = ordered._ordered(limit_nbytes, "")
        if again.replay.step_s >= ordered.replay.step_s:
            return ordered
        return replace(again, overlapped=(limit_nbytes, feeding))

    def _ordered(self, limit_nbytes: int, feeding: Feeding) -> ScheduledModule:
        order = tuple(self._overlap.order(limit_nbytes, feeding))
        if list(order) == sorted(order):
            return self
        if order not in self._reordered:
            module = self._overlap.module(order)
            self._reordered[order] = replace(
                self, module=module, overlapped=(limit_nbytes, feeding)
            )
        return self._reordered[order]

    @functools.cached_property
    def _overlap(self) -> Overlap:
        return Overlap(self.module, self.device.backend, self.replay)

    @functools.cached_property
    def _reordered(self) -> dict[tuple[int, ...], ScheduledModule]:
        return {}

    def with_waits(self) -> ScheduledModule:
        """A copy that charges each collective of the entry only the stall it causes in this order.

        A plan may end a collective before the next kernel begins. After planning, the neighbouring
        kernels overlap the collective again.
        """
        if self.machine is None:
            return self
        ops = self.module.entry.ops
        waits = dict[str, float]()
        for op in ops.values():
            start_op = ops[op.operands[0]] if op.opcode.endswith("-done") else None
            if start_op is not None and is_collective(start_op.opcode):
                start, end = self.replay.spans[op.name]
                # a longer wait is for collectives before it on the link
                waits[op.operands[0]] = min(end - start, self.replay.seconds[op.operands[0]])
        return replace(self, waits=waits)

    @functools.cached_property
    def replay(self) -> Replay:
        """The replay of a step: bytes moved, and seconds."""
        return replay(self.module, self.device, self.machine)

    @functools.cached_property
    def problem(self) -> Problem:
        """The problem without seconds: enough to follow a plan."""
        problem = problem_of(self.module, self.device.backend)
        problem = replace(problem, vector_memory_bytes=self.device.vector_memory_bytes or 0)
        return with_pins(problem, self.module, self.pins) if self.pins else problem

    @functools.cached_property
    def timed_problem(self) -> Problem:
        """The problem with the seconds of the replay and the waits for collectives."""
        return self.problem.with_seconds(
            {**self.replay.seconds, **self.replay.blocks, **self.waits}
        )

    def rewrite(
        self, budget_nbytes: int | None, values: Sequence[str] = (), whole: bool = False
    ) -> ScheduledModule:
        """The module rewritten for this many bytes of temporaries; the module itself for None.

        On a GPU, it makes collectives synchronous that hold much memory while they run, inlines
        cheap values into their readers, merges fusions with common operands, and splits fusions
        that need much of the budget. On a CPU it changes nothing: XLA:CPU has no multi-output
        fusions, and rounds float16 inside a fusion differently than between two.

        Args:
          values: become extra outputs of fusions that read their operands
            (`xla.rewrites.extra_outputs`).
          whole: do not split fusions.
        """
        if budget_nbytes is None or not self.device.backend.merges_fusions:
            return self
        key = budget_nbytes, tuple(values), whole
        if key not in self._rewrites:
            self._rewrites[key] = (
                self._fuse(budget_nbytes, values) if whole else self._split(budget_nbytes, values)
            )
        return self._rewrites[key]

    @functools.cached_property
    def _rewrites(self) -> dict[tuple[int, tuple[str, ...], bool], ScheduledModule]:
        return {}

    def _fuse(self, budget_nbytes: int, values: Sequence[str]) -> ScheduledModule:
        """The module with producers inlined, siblings merged, and values as extra outputs."""
        if values:
            merged = self.rewrite(budget_nbytes, whole=True)
            return merged._with(add_outputs(merged.module, values, budget_nbytes))
        settled = self._with(settle_pairs(self.module, self.problem, budget_nbytes))
        inlined = settled._inlined
        return inlined._with(merge_fusions(inlined.module, inlined.problem, budget_nbytes).module)

    def _split(self, budget_nbytes: int, values: Sequence[str]) -> ScheduledModule:
        whole = self.rewrite(budget_nbytes, values, whole=True)
        return whole._with(split_fusions(whole.module, whole.problem, budget_nbytes))

    @functools.cached_property
    def _inlined(self) -> ScheduledModule:
        """The module with large fills directly before their readers, and cheap values inlined."""
        late = self._with(fill_late(self.module, self.packing.nbytes))
        return late._with(inline_producers(late.module, late.problem))

    def _with(self, module: Module) -> ScheduledModule:
        return self if module is self.module else replace(self, module=module)

    @functools.cached_property
    def packing(self) -> Packing:
        return pack(self.problem)

    @functools.cached_property
    def lifetimes(self) -> tuple[Sequence[Lifetime], Sequence[Lifetime]]:
        """Lifetimes of temporaries on the device, and on the host."""
        return lifetimes(self.problem)

    @functools.cached_property
    def constant_bytes(self) -> int:
        """Bytes of large constants, such as arrays that the step closes over."""
        return sum(op.nbytes for op in self.module.large_constants)

    @functools.cached_property
    def workspaces(self) -> Mapping[str, int]:
        """Bytes of the workspace of every library's kernel that has one, by name."""
        sizes = ((op.name, workspace_nbytes(op)) for op in self.module.instructions.values())
        return {name: nbytes for name, nbytes in sizes if nbytes}

    @functools.cached_property
    def largest_workspace_bytes(self) -> int:
        """Bytes of the largest workspace that an algorithm of a convolution needs."""
        return largest_algorithm_workspace(self.module)

    @functools.cached_property
    def resident_bytes(self) -> int:
        """Bytes on the device during the whole step.

        These are arguments, large constants, outputs that alias no argument, and the outputs'
        table.
        """
        module = self.module
        arguments = sum(
            buffer.nbytes for buffer in self.problem.buffers if buffer.role is Role.ARGUMENT
        )
        arrays = module.entry.root.result
        outputs = sum(
            array.nbytes
            for number, array in enumerate(arrays)
            if number not in module.aliases and not array.on_host
        )
        table = POINTER_BYTES * len(arrays) if isinstance(module.entry.root.shape, tuple) else 0
        return arguments + outputs + table + self.constant_bytes

    @property
    def device_bytes(self) -> int:
        """Bytes that XLA will allocate: temporaries, arguments, outputs and large constants."""
        return self.resident_bytes + self.packing.nbytes
