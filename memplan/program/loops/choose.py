"""Choose residuals: the fastest options of a step's pairs of loops within a limit of bytes."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from memplan.errors import UnsupportedProgramError
from memplan.hardware.device import Device
from memplan.planning.loops import (
    PRICES,
    Loop,
    Option,
    Residuals,
    cheapest,
    extra_seconds,
    options,
    stacked_nbytes,
)
from memplan.program.loops.residuals import outer_loops, with_residuals
from memplan.program.trace import Program


@dataclass(frozen=True)
class ResidualChoices:
    """The residuals that a step may have, and what they cost by the planner's estimate."""

    step: Program  # as the user wrote it
    device: Device

    def fewer(
        self,
        program: Program,
        host_bytes: int,
        excess_bytes: int,
        may_segment: bool = True,
    ) -> Program | None:
        """The fastest program that stacks `excess_bytes` fewer, else the one that stacks fewest.

        Args:
          program: the step, maybe with other residuals.
          may_segment: loops may run in segments, which index whole stacks.

        Returns:
          None if no equation makes residuals for another, or if there cannot be fewer.
        """
        loops = self._loops
        frontiers = [
            options(loop if may_segment else replace(loop, reverses=False), self.device, host_bytes)
            for loop in loops
        ]
        current_nbytes = self.nbytes(program)
        choice, price = _fastest(frontiers, current_nbytes - excess_bytes)
        if _nbytes(choice) >= current_nbytes:
            return None

        def decide(loop: Loop) -> Residuals:
            if loop in loops:
                return choice[loops.index(loop)].residuals
            return cheapest(loop, price, self.device, host_bytes > 0)  # inside a backward body

        return with_residuals(self.step, decide)

    def nbytes(self, program: Program) -> int:
        """Bytes of a program's stacks on the device."""
        return sum(stacked_nbytes(loop, residuals) for loop, residuals in self._residuals(program))

    def seconds(self, program: Program) -> float:
        """Seconds that a program's residuals add to the step."""
        return sum(
            extra_seconds(loop, residuals, self.device)
            for loop, residuals in self._residuals(program)
            if residuals is not None
        )

    def _residuals(self, program: Program) -> list[tuple[Loop, Residuals | None]]:
        """The step's pairs with a program's residuals; None as the user wrote them."""
        decided = list(program.loops)
        return [
            (loop, next((chosen for decided_loop, chosen in decided if decided_loop == loop), None))
            for loop in self._loops
        ]

    @functools.cached_property
    def _loops(self) -> list[Loop]:
        return _loops_of(self.step)


def pinned_residuals(program: Program, device: Device) -> Program:
    """The fastest program whose loops honour the pins; itself if they do as they are written."""

    def decide(loop: Loop) -> Residuals | None:
        return cheapest(loop, 0.0, device) if loop.has_moving_pins else None

    if not any(loop.has_moving_pins for loop in _loops_of(program)):
        return program
    return with_residuals(program, decide)


def _loops_of(program: Program) -> list[Loop]:
    """The program's pairs of loops; none for a step that writes into its arguments."""
    try:
        return outer_loops(program)
    except UnsupportedProgramError:
        return []


def _nbytes(choice: Sequence[Option]) -> int:
    return sum(option.nbytes for option in choice)


def _fastest(frontiers: Sequence[Sequence[Option]], nbytes: int) -> tuple[list[Option], float]:
    """The fastest choice of one option per pair within `nbytes`, else the smallest choice.

    First all pairs pay the same price per byte. Then each pair in turn takes the bytes that remain.

    Returns:
      The choice, and the price per byte in seconds.
    """
    choice = [frontier[-1] for frontier in frontiers]
    chosen_price = PRICES[-1]
    if _nbytes(choice) > nbytes:
        return choice, chosen_price
    for price in PRICES:

        def cost(option: Option, price: float = price) -> float:
            return option.seconds + price * option.nbytes

        at_price = [min(frontier, key=cost) for frontier in frontiers]
        if _nbytes(at_price) <= nbytes:
            choice, chosen_price = at_price, price
            break
    for number, frontier in enumerate(frontiers):
        available_nbytes = nbytes - _nbytes(choice) + choice[number].nbytes
        choice[number] = next(option for option in frontier if option.nbytes <= available_nbytes)
    return choice, chosen_price
