"""A scheduled module with its derived facts: problem, seconds, bytes, and its rewrites for a plan."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from memplan.compilation import kept
from memplan.hardware.device import Device
from memplan.hardware.machine import Machine
from memplan.hardware.roofline import copy_seconds
from memplan.planning.packing import Lifetime, Packing, lifetimes, live_nbytes, pack
from memplan.planning.plan import Plan, name_actions
from memplan.planning.problem import POINTER_BYTES, Pin, Problem, Role
from memplan.planning.registry import Planner
from memplan.planning.schedule import Solution, rank
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

# Of a plain step: a plan that takes no more is taken. Where holes cost much, extra outputs can cost more: ResNet-50 at
# 30 % took 175 ms so and 144 without, the 3D U-Net in bfloat16 at half its bytes 2.9 ms and 2.6.
_LITTLE = 1.1
Agree = Callable[[str, str, Callable[[], Plan]], Plan]
"""(fingerprint of the module, key of all other facts, function that makes a plan) -> the plan of all processes."""


@dataclass(frozen=True)
class Plans:
    """Plans for one module."""

    plain: ScheduledModule
    budget_bytes: int  # of the whole step, on the device
    host_bytes: int  # for offloaded values
    planner: Planner

    def agree(self, agree: Agree) -> Plan:
        """The plan that all processes of the step follow."""
        plain, fingerprint = self.plain, self.plain.module.fingerprint
        limits = self.budget_bytes, self.host_bytes
        facts = fingerprint, self.planner.name, *limits, plain.device, plain.machine, plain.pins
        return agree(fingerprint, kept.digest(*facts), self.make)

    def make(self) -> Plan:
        """A plan for the room that the budget leaves, or else the smallest.

        If the smallest fits, its split kernels are planned within the budget. It is the same for every budget, so that
        all errors name the same smallest budget that works.
        """
        plain, room_nbytes = self.plain, self.budget_bytes - self.plain.resident_bytes
        extra = self._extra_outputs(plain.rewrite(room_nbytes, whole=True), room_nbytes)
        ways = [self._plan(room_nbytes, room_nbytes, extra)] if extra else []
        if not ways or not ways[0][0].fits or ways[0][0].seconds > _LITTLE * plain.replay.step_s:
            ways.append(self._plan(room_nbytes, room_nbytes))
        best = min(ways, key=lambda way: rank(way[0]))
        if best[0].fits:
            return best[1]
        if self.plain.waits:  # with every collective counted in full, there is time for more copies
            return replace(self, plain=replace(self.plain, waits={})).make()
        smallest = self._plan(0, 0)
        if smallest[0].nbytes > room_nbytes:
            return smallest[1]
        ways = [smallest, self._plan(0, room_nbytes)]
        return min(ways, key=lambda way: (way[0].nbytes > room_nbytes, way[0].seconds))[1]

    def _plan(self, rewrite_nbytes: int, budget_nbytes: int, extra: Sequence[str] = ()) -> tuple[Solution, Plan]:
        """A plan for the module rewritten for some room, within a budget for temporaries."""
        device = self.plain.device
        copy_s = functools.partial(copy_seconds, device=device) if self.host_bytes > 0 else None
        problem = self.plain.rewrite(rewrite_nbytes, extra).timed_problem
        found = self.planner.plan(problem, budget_nbytes, self.host_bytes, copy_s)
        actions, fingerprint = name_actions(problem, found.schedule), self.plain.module.fingerprint
        plan = Plan(
            actions,
            fingerprint,
            self.planner.name,
            device.name,
            rewritten_for_nbytes=rewrite_nbytes,
            overlapped=self.plain.overlapped,
            budget_bytes=self.budget_bytes,
            extra_outputs=tuple(extra),
            pins=self.plain.pins,
        )
        return found, plan

    def _extra_outputs(self, base: ScheduledModule, room_nbytes: int) -> Sequence[str]:
        """Values that a first plan recomputes at their price as extra outputs."""
        if base.device.target is None:
            return ()
        problem = base.timed_problem
        cheaper = output_costs(base.module, problem, room_nbytes, live_nbytes(problem).tolist())
        if not cheaper:
            return ()
        maker = {buffer.name: buffer.maker for buffer in problem.buffers if buffer.name in cheaper}
        share = {maker[name]: price for name, price in cheaper.items()}
        kernels = (replace(one, seconds=one.seconds * share.get(n, 1.0)) for n, one in enumerate(problem.kernels))
        recomputed = recomputed_kernels(replace(problem, kernels=tuple(kernels)), room_nbytes)
        return [name for name in cheaper if maker[name] in recomputed]


@dataclass(frozen=True)
class ScheduledModule:
    """A scheduled module, unmodified or planned."""

    module: Module
    device: Device
    machine: Machine | None = None  # of which the device is one
    pins: tuple[Pin, ...] = ()  # of the step, in the order of their marks
    # seconds that kernels wait for collectives, by the name of what starts them; rewrites keep them
    waits: Mapping[str, float] = field(default_factory=dict, compare=False)
    overlapped: tuple[int, bool] | None = None  # what its order was made for: `Plan.overlapped`

    def overlap(self, limit_nbytes: int, feeds_links: bool = False) -> ScheduledModule:
        """The same, with its collectives beside more kernels (`Overlap.order`); itself if none moves."""
        order = tuple(self._overlap.order(limit_nbytes, feeds_links))
        if list(order) == sorted(order):
            return self
        if order not in self._in_order:
            module = self._overlap.module(order)
            self._in_order[order] = replace(self, module=module, overlapped=(limit_nbytes, feeds_links))
        return self._in_order[order]

    @functools.cached_property
    def _overlap(self) -> Overlap:
        return Overlap(self.module, self.device.target is not None, self.replay)

    @functools.cached_property
    def _in_order(self) -> dict[tuple[int, ...], ScheduledModule]:
        return {}

    def with_waits(self) -> ScheduledModule:
        """The same, whose rewrites count of each collective of the entry what its kernels wait for it here.

        A plan may end a collective before the next kernel begins; afterwards its neighbours run beside it again.
        """
        if self.machine is None:
            return self
        ops, found = self.module.entry.ops, dict[str, float]()
        for op in ops.values():
            if op.opcode.endswith("-done") and is_collective(ops[op.operands[0]].opcode):
                start, end = self.replay.clock[op.name]
                found[op.operands[0]] = min(end - start, self.replay.seconds[op.operands[0]])  # the rest is a queue's
        return replace(self, waits=found)

    @functools.cached_property
    def replay(self) -> Replay:
        """The replay of a step: bytes moved and seconds."""
        return replay(self.module, self.device, self.machine)

    @functools.cached_property
    def problem(self) -> Problem:
        """The problem without seconds, which following a plan does not need."""
        problem = problem_of(self.module, self.device.target is not None)
        return with_pins(problem, self.module, self.pins) if self.pins else problem

    @functools.cached_property
    def timed_problem(self) -> Problem:
        """The problem with the seconds of the replay, and those that kernels wait for collectives."""
        return self.problem.with_seconds({**self.replay.seconds, **self.replay.blocks, **self.waits})

    def rewrite(self, room_nbytes: int | None, values: Sequence[str] = (), whole: bool = False) -> ScheduledModule:
        """The module rewritten for this many bytes of temporaries; the module itself for None.

        For a GPU: collectives that hold much of the room while they are under way made synchronous, cheap values
        inlined into their readers, fusions with common operands merged, fusions that crowd the room split. For a CPU
        unchanged: XLA:CPU has no multi-output fusions, and rounds float16 inside of a fusion
        differently from between two.

        Args:
          values: become extra outputs of fusions that read their operands (`xla.rewrites.extra_outputs`).
          whole: do not split fusions.
        """
        if room_nbytes is None or self.device.target is None:
            return self
        key = room_nbytes, tuple(values), whole
        if key not in self._rewrites:
            self._rewrites[key] = self._fuse(room_nbytes, values) if whole else self._split(room_nbytes, values)
        return self._rewrites[key]

    @functools.cached_property
    def _rewrites(self) -> dict[tuple[int, tuple[str, ...], bool], ScheduledModule]:
        return {}

    def _fuse(self, room_nbytes: int, values: Sequence[str]) -> ScheduledModule:
        """The module with other fusions: producers inlined, siblings merged, values as extra outputs."""
        if values:
            found = self.rewrite(room_nbytes, whole=True)
            return found._with(add_outputs(found.module, values, room_nbytes))
        found = self._with(settle_pairs(self.module, self.problem, room_nbytes))._inlined
        return found._with(merge_fusions(found.module, found.problem, room_nbytes).module)

    def _split(self, room_nbytes: int, values: Sequence[str]) -> ScheduledModule:
        whole = self.rewrite(room_nbytes, values, whole=True)
        return whole._with(split_fusions(whole.module, whole.problem, room_nbytes))

    @functools.cached_property
    def _inlined(self) -> ScheduledModule:
        """The module with large fills right before their readers, and cheap values inlined."""
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
    def resident_bytes(self) -> int:
        """Bytes on the device throughout: arguments, large constants, outputs that alias no argument, and the outputs'
        table.
        """
        problem, module = self.problem, self.module
        own = [buffer.nbytes for buffer in problem.buffers if buffer.role is Role.ARGUMENT]
        returned = module.entry.root.result
        made = [
            array.nbytes for number, array in enumerate(returned) if number not in module.aliases and not array.on_host
        ]
        table = POINTER_BYTES * len(returned) if isinstance(module.entry.root.shape, tuple) else 0
        return sum(own) + sum(made) + table + self.constant_bytes

    @property
    def device_bytes(self) -> int:
        """Bytes that XLA will allocate: temporaries, arguments, outputs and large constants."""
        return self.resident_bytes + self.packing.nbytes
