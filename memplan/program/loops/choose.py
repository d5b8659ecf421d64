"""Choose residuals: of all choices that a price per stacked byte gives for a step's loops, the few worth compiling."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from memplan.errors import UnsupportedProgramError
from memplan.hardware.device import Device
from memplan.planning.loops import PRICES, Loop, Residuals, cheapest, extra_seconds, stacked_nbytes
from memplan.program.loops.residuals import outer_loops, with_residuals
from memplan.program.trace import Program


@dataclass(frozen=True)
class _Choice:
    """The loops' choice for one price per byte: bytes stacked on the device, and extra seconds."""

    price: float
    moves: bool  # stacks may be on the host
    nbytes: int
    seconds: float

    def of(self, device: Device) -> Callable[[Loop], Residuals]:
        return lambda loop: cheapest(loop, self.price, device, self.moves)


def fewer_residuals(program: Program, device: Device, host_bytes: int, excess_bytes: int) -> Iterator[Program]:
    """The fastest program whose loops stack `excess_bytes` fewer bytes, then the one whose loops stack the fewest.

    Yields nothing if no loop reads another's stacks, or if residuals were chosen already.
    """
    original = program.original
    loops = _loops_of(original) if not program.loops else []
    choices = list(_frontier(loops, device, host_bytes > 0))
    if not choices:
        return
    now = sum(stacked_nbytes(loop, None) for loop in loops)
    enough = [choice for choice in choices if choice.nbytes <= now - excess_bytes]
    picked = [min(enough, key=lambda choice: choice.seconds)] if enough else []
    picked.append(min(choices, key=lambda choice: (choice.nbytes, choice.seconds)))
    for choice in dict.fromkeys(picked):
        if choice.nbytes < now:
            yield with_residuals(original, choice.of(device))


def _loops_of(program: Program) -> list[Loop]:
    """Its pairs of loops; none for a step that writes into its arguments."""
    try:
        return outer_loops(program)
    except UnsupportedProgramError:
        return []


def _frontier(loops: Sequence[Loop], device: Device, moves: bool) -> Iterator[_Choice]:
    """One choice for every price of a byte that makes a difference."""
    known: set[tuple[Residuals, ...]] = set()
    for moved in dict.fromkeys((False, moves)) if loops else ():
        for price in PRICES:
            chosen = tuple(cheapest(loop, price, device, moved) for loop in loops)
            if chosen in known:
                continue
            known.add(chosen)
            pairs = list(zip(loops, chosen, strict=True))
            yield _Choice(
                price,
                moved,
                sum(stacked_nbytes(loop, residuals) for loop, residuals in pairs),
                sum(extra_seconds(loop, residuals, device) for loop, residuals in pairs),
            )
