"""Choose residuals: the fastest options of a step's pairs of loops within a limit of bytes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from memplan.errors import UnsupportedProgramError
from memplan.hardware.device import Device
from memplan.planning.loops import (
    PRICES,
    SIZES,
    Loop,
    Option,
    Residuals,
    cheapest,
    option_of,
    options,
    total_nbytes,
)
from memplan.program.loops.residuals import outer_loops, with_residuals
from memplan.program.trace import Program

# Where no choice is within the limit, those are alike that differ by a hundredth of the largest:
# estimates are off by more. For 0.5 of 512 MiB, a loop of 256 short trips copied to the host and
# back in each (RNN-T's joint network on an A100: 11.7 instead of 10.9 ms).
_ALIKE_PARTS = 100
# A stacked byte crosses device memory at most 16 times more than estimated: its slice is copied at
# each boundary in both directions, and kernels that are computed again instead may fuse. Two drawn
# steps on an A100 took 13.9 and 14.5 ms with the fewest residuals, 16.7 and 14.8 with more.
_MOST_CROSSINGS = 16


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
    ) -> ResidualChoice | None:
        """The fastest choice that stacks `excess_bytes` fewer, else the one that stacks fewest.

        Args:
          program: the step, maybe with other residuals.
          may_segment: loops may run in segments, which index whole stacks.

        Returns:
          None if no equation makes residuals for another, or if there cannot be fewer.
        """
        limit_nbytes = self.nbytes(program) - excess_bytes
        choice = self._choice(False, limit_nbytes, host_bytes, may_segment)
        if self._loops[True] != self._loops[False]:
            # what crosses the loops around is not computed twice inside of them
            beside = self._choice(True, limit_nbytes, host_bytes, may_segment)
            if beside.nbytes <= limit_nbytes or beside.nbytes < choice.nbytes:
                choice = beside
        return None if choice.nbytes >= self.nbytes(program) else choice

    def _choice(
        self, across: bool, limit_nbytes: int, host_bytes: int, may_segment: bool
    ) -> ResidualChoice:
        loops = self._loops[across]
        frontiers = self._frontiers(across, host_bytes, may_segment)
        chosen, price = _fastest(loops, frontiers, limit_nbytes)
        nbytes = total_nbytes(loops, chosen)
        stacked_s = _MOST_CROSSINGS * nbytes / self.device.achieved_bandwidth
        return ResidualChoice(across, tuple(chosen), price, nbytes, stacked_s, host_bytes > 0)

    def _frontiers(self, across: bool, host_bytes: int, may_segment: bool) -> list[list[Option]]:
        """The options of each pair, found once."""
        key = across, host_bytes, may_segment
        if key not in self._options:
            self._options[key] = [
                options(
                    loop if may_segment else replace(loop, reverses=False), self.device, host_bytes
                )
                for loop in self._loops[across]
            ]
        return self._options[key]

    @functools.cached_property
    def _options(self) -> dict[tuple[bool, int, bool], list[list[Option]]]:
        return {}

    def write(self, choice: ResidualChoice) -> Program:
        """The step with these residuals."""
        loops = self._loops[choice.across]

        def decide(loop: Loop) -> Residuals:
            if loop in loops:
                return choice.options[loops.index(loop)].residuals
            # in another's backward part
            return cheapest(loop, choice.price, self.device, choice.may_use_host)

        return with_residuals(self.step, decide, choice.across)

    def nbytes(self, program: Program) -> int:
        """Bytes of a program's residuals on the device."""
        pairs = self._residuals(program)
        return total_nbytes(
            [loop for loop, _ in pairs],
            [option_of(loop, residuals, self.device) for loop, residuals in pairs],
        )

    def _residuals(self, program: Program) -> list[tuple[Loop, Residuals | None]]:
        """The step's pairs with a program's residuals; None as the user wrote them."""
        decided = list(program.loops)
        return [
            (loop, next((chosen for decided_loop, chosen in decided if decided_loop == loop), None))
            for loop in self._loops[program.decides_across]
        ]

    @functools.cached_property
    def _loops(self) -> tuple[list[Loop], list[Loop]]:
        """The step's pairs; and those with what crosses the loops around (see `rewrite`)."""
        return _loops_of(self.step), _loops_of(self.step, across=True)


@dataclass(frozen=True)
class ResidualChoice:
    """One option per pair."""

    across: bool  # see `loops.residuals.rewrite`
    options: tuple[Option, ...]
    price: float  # seconds per byte, for pairs in the backward part of others
    nbytes: int
    stacked_s: float  # most seconds that stacked bytes take beyond the estimate
    may_use_host: bool

    @property
    def has_segments(self) -> bool:
        return any(option.residuals.segments for option in self.options)

    @property
    def seconds(self) -> float:
        """Seconds that the residuals add to the step, by the estimate."""
        return _seconds(self.options)

    @property
    def most_seconds(self) -> float:
        """Seconds that they add if stacks take as long as they may."""
        return self.seconds + self.stacked_s


def pinned_residuals(program: Program, device: Device) -> Program:
    """The fastest program whose loops honour the pins; itself if they do as they are written."""

    def decide(loop: Loop) -> Residuals | None:
        return cheapest(loop, 0.0, device) if loop.has_moving_pins else None

    if not any(loop.has_moving_pins for loop in _loops_of(program)):
        return program
    return with_residuals(program, decide)


def _loops_of(program: Program, across: bool = False) -> list[Loop]:
    """The program's pairs of loops; none for a step that writes into its arguments."""
    try:
        return outer_loops(program, across)
    except UnsupportedProgramError:
        return []


def _fastest(
    loops: Sequence[Loop], frontiers: Sequence[Sequence[Option]], limit_nbytes: int
) -> tuple[list[Option], float]:
    """The fastest choice of one option per pair within the limit, else the smallest choice.

    First all pairs pay the same price per byte: of their stacks, or also of what a trip computes
    again. Then each pair in turn takes the bytes that remain. If no choice is within a limit above
    0, it is the fastest of the smallest (`_ALIKE_PARTS`).

    Returns:
      The choice, and the price per byte in seconds.
    """
    choices = [(_at_price(frontiers, size, price), price) for size in SIZES for price in PRICES]
    fitting = [choice for choice in choices if total_nbytes(loops, choice[0]) <= limit_nbytes]
    if not fitting:
        sizes = [total_nbytes(loops, choice) for choice, _ in choices]
        alike = min(sizes) + (max(sizes) // _ALIKE_PARTS if limit_nbytes > 0 else 0)
        smallest = [choice for choice, size in zip(choices, sizes, strict=True) if size <= alike]
        return min(smallest, key=lambda choice: _seconds(choice[0]))[0], PRICES[-1]
    choice, price = min(fitting, key=lambda choice: _seconds(choice[0]))
    for number, frontier in enumerate(frontiers):
        for option in frontier:
            more = [*choice[:number], option, *choice[number + 1 :]]
            if total_nbytes(loops, more) <= limit_nbytes:
                choice = more
                break
    return choice, price


def _seconds(choice: Sequence[Option]) -> float:
    return sum(option.seconds for option in choice)


def _at_price(
    frontiers: Sequence[Sequence[Option]], size: Callable[[Option], int], price: float
) -> list[Option]:
    """The cheapest option of each pair."""
    return [
        min(frontier, key=lambda option: option.seconds + price * size(option))
        for frontier in frontiers
    ]
