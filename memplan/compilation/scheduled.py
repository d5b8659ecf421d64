"""A scheduled module as it is read: its problem, its seconds, its bytes, and what it is rewritten into for a plan."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from memplan.hardware.device import Device
from memplan.hardware.topology import Topology
from memplan.planning.packing import Lifetime, Packing, lifetimes, pack
from memplan.planning.problem import POINTER_BYTES, Problem, Role
from memplan.xla.buffers import problem_of
from memplan.xla.module import Module, large_constants
from memplan.xla.replay import Replay, replay
from memplan.xla.rewrites.extra_outputs import add_outputs
from memplan.xla.rewrites.inline import inline_producers
from memplan.xla.rewrites.late_fills import fill_late
from memplan.xla.rewrites.merge import merge_fusions
from memplan.xla.rewrites.split import split_fusions


@dataclass(frozen=True)
class ScheduledModule:
    """A scheduled module, as it is or as it is planned."""

    module: Module
    device: Device
    topology: Topology | None = None

    @functools.cached_property
    def replay(self) -> Replay:
        """What a step moves and how long that takes."""
        return replay(self.module, self.device, self.topology)

    @functools.cached_property
    def problem(self) -> Problem:
        """Its kernels take no time yet: who follows a plan has no need of the replay."""
        return problem_of(self.module, self.device.target is not None)

    @functools.cached_property
    def timed_problem(self) -> Problem:
        """The problem with the seconds of the replay."""
        return self.problem.with_seconds({**self.replay.seconds, **self.replay.blocks})

    def rewrite(self, room_nbytes: int | None, values: Sequence[str] = (), whole: bool = False) -> ScheduledModule:
        """What is planned for so much room for temporaries; the module as it stands for None.

        A GPU's with cheap values made inside of their readers, fusions that read the same as one, and what crowds the
        room split. A CPU's as it is: XLA:CPU makes no fusions of several results, and rounds float16 inside of a fusion
        otherwise than between two.

        Args:
          values: get outputs of their own in fusions that make them anyway (`xla.rewrites.extra_outputs`).
          whole: kernels that crowd the room are not split.
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
        """With other fusions: readers that make what they read, siblings merged, values with outputs of their own."""
        if values:
            found = self.rewrite(room_nbytes, whole=True)
            return replace(found, module=add_outputs(found.module, values, room_nbytes))
        found = self._inlined
        return replace(found, module=merge_fusions(found.module, found.problem, room_nbytes).module)

    def _split(self, room_nbytes: int, values: Sequence[str]) -> ScheduledModule:
        whole = self.rewrite(room_nbytes, values, whole=True)
        pieces = split_fusions(whole.module, whole.problem, room_nbytes)
        return whole if pieces is None else replace(whole, module=pieces)

    @functools.cached_property
    def _inlined(self) -> ScheduledModule:
        """With large fills right before their readers, and cheap values made inside of theirs."""
        module = fill_late(self.module, self.packing.nbytes)
        late = self if module is self.module else replace(self, module=module)
        found = inline_producers(late.module, late.problem)
        return late if found is None else replace(late, module=found)

    @functools.cached_property
    def packing(self) -> Packing:
        return pack(self.problem)

    @functools.cached_property
    def lifetimes(self) -> tuple[Sequence[Lifetime], Sequence[Lifetime]]:
        """Of temporaries on the device, and on the host."""
        return lifetimes(self.problem)

    @functools.cached_property
    def constant_bytes(self) -> int:
        """Of large constants, such as arrays that the step closes over."""
        return sum(op.nbytes for text in self.module.texts.values() for op in large_constants(text))

    @functools.cached_property
    def resident_bytes(self) -> int:
        """On the device throughout: arguments, large constants, outputs over no argument, and the outputs' table."""
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
        """What XLA will allocate: temporaries, arguments, outputs and large constants."""
        return self.resident_bytes + self.packing.nbytes
