"""The transformed programs of a step that may be compiled in its place.

The transforms are applied in one order: stacks by index, residuals, slabs, state on the host.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from memplan.hardware.device import Device
from memplan.planning.transforms import LessWorkspace, StateOnHost
from memplan.program.loops.choose import ResidualChoice, ResidualChoices, pinned_residuals
from memplan.program.loops.stacks import with_indexed_stacks
from memplan.program.slabs.choose import SlabCandidate, SlabChoices
from memplan.program.trace import Program
from memplan.program.transforms import apply

MORE_THAN_ANY = 1 << 62
"""More bytes than any step has: with this excess, loops keep as few residuals as they can."""


@dataclass(frozen=True)
class Candidates:
    """Other programs of a step, made on demand, all with the same state on the host."""

    step: Program  # before all transforms
    device: Device
    device_bytes: int  # the limit
    host_bytes: int  # the limit
    state: StateOnHost
    splits: bool = True  # parts of the step may run in slabs

    @property
    def first(self) -> Program:
        """The step with the residuals that its pins need."""
        pinned = pinned_residuals(self.step, self.device) if self.step.pins else self.step
        return self._with_state(pinned)

    def indexed_stacks(self, program: Program) -> Program | None:
        """The program with stacks that loops read by index; None if it has no large stacks.

        Only for one GPU, without state on the host.
        """
        is_divided = program.traced.division is not None
        if not self.device.backend.has_own_memory or is_divided or self.state.inputs:
            return None
        return with_indexed_stacks(program)

    def fewer_residuals(
        self,
        program: Program,
        excess_bytes: int,
        may_use_host: bool,
        may_segment: bool = True,
    ) -> ResidualChoice | None:
        """The fastest choice whose loops keep `excess_bytes` fewer (see `loops.choose`)."""
        host_bytes = self.host_bytes if may_use_host else 0
        # With state on the host, each trip of a loop in one piece streams its layer.
        may_segment = may_segment and not self.state.inputs
        return self.residuals.fewer(program, host_bytes, excess_bytes, may_segment)

    def with_residuals(self, choice: ResidualChoice) -> Program:
        """The step with these residuals."""
        return self._with_state(self.residuals.write(choice))

    @functools.cached_property
    def residuals(self) -> ResidualChoices:
        """The residuals that the step's loops may have."""
        return ResidualChoices(self.step, self.device)

    def in_slabs(self, slowdown: float, estimate: float | None = None) -> Iterator[SlabCandidate]:
        """Yield the step in slabs (see `SlabChoices`).

        Args:
          slowdown: no candidate is expected to take more than this many times as long.
          estimate: the estimate of a byte; None: not known yet.
        """
        limits = self.device_bytes, self.host_bytes
        for candidate in self.slabs.programs(*limits, slowdown, estimate):
            yield replace(candidate, write=functools.partial(self._written, candidate))

    @functools.cached_property
    def slabs(self) -> SlabChoices:
        """The slabs in which the step may run.

        If none are expected to fit beside the residuals of its loops, those of the step with the
        fewest residuals: a layer in slabs helps nothing while the loop over the layers stacks what
        all of them computed.
        """
        slabs = SlabChoices(self.indexed_stacks(self.step) or self.step, self.device)
        with_fewest = self._slabs_with_fewest_residuals
        if with_fewest is None or slabs.may_fit(self.device_bytes, self.host_bytes):
            return slabs
        return with_fewest

    @functools.cached_property
    def in_smallest_slabs(self) -> tuple[Program, ...]:
        """The step with the fewest residuals, in slabs of the fewest bytes (see `SlabChoices`).

        The limit on the device does not change them.
        """
        slabs = self._slabs_with_fewest_residuals or self.slabs
        return tuple(map(self._written, slabs.smallest(self.host_bytes)))

    @functools.cached_property
    def _slabs_with_fewest_residuals(self) -> SlabChoices | None:
        """Slabs of the step with the fewest residuals; None if its loops keep none."""
        fewest = self.fewer_residuals(
            self.step, MORE_THAN_ANY, may_use_host=True, may_segment=False
        )
        return SlabChoices(self.residuals.write(fewest), self.device) if fewest else None

    def less_workspace(self, program: Program) -> Program | None:
        """The program with algorithms that need less workspace; None if it has them.

        Only for one GPU: XLA divides its timing among the processes of a step.
        """
        is_divided = program.traced.division is not None
        if not self.device.backend.has_own_memory or is_divided or program.asks_less_workspace:
            return None
        return apply(program, LessWorkspace())

    def _written(self, slabs: SlabCandidate) -> Program:
        return self._with_state(slabs.write())

    def _with_state(self, program: Program) -> Program:
        return apply(program, self.state)
