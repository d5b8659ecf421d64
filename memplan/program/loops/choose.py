"""Choose residuals: of all options of a step's pairs of loops, the fastest within the bytes that there are."""

from collections.abc import Sequence
from dataclasses import replace

from memplan.errors import UnsupportedProgramError
from memplan.hardware.device import Device
from memplan.planning.loops import PRICES, Loop, Option, Residuals, cheapest, options, stacked_nbytes
from memplan.program.loops.residuals import outer_loops, with_residuals
from memplan.program.trace import Program


def fewer_residuals(
    program: Program, device: Device, host_bytes: int, excess_bytes: int, may_segment: bool = True
) -> Program | None:
    """The fastest program whose loops stack `excess_bytes` fewer bytes; if there is none, the one that stacks fewest.

    Args:
      may_segment: loops may run in segments, which take slices of whole stacks.

    None if no loop reads another's stacks, or if none are fewer.
    """
    original, chosen = program.original, program.loops
    loops = _loops_of(original)
    frontiers = [options(loop if may_segment else replace(loop, reverses=False), device, host_bytes) for loop in loops]
    now = sum(stacked_nbytes(loop, next((one for known, one in chosen if known == loop), None)) for loop in loops)
    choice = _fastest(frontiers, now - excess_bytes)
    return _written(original, loops, choice, device, host_bytes > 0) if _nbytes(choice) < now else None


def pinned_residuals(program: Program, device: Device) -> Program:
    """The fastest program whose loops keep the pins; itself where they keep them as they are written."""

    def decide(loop: Loop) -> Residuals | None:
        return cheapest(loop, 0.0, device) if loop.has_moving_pins else None

    return with_residuals(program, decide) if any(loop.has_moving_pins for loop in _loops_of(program)) else program


def _loops_of(program: Program) -> list[Loop]:
    """Its pairs of loops; none for a step that writes into its arguments."""
    try:
        return outer_loops(program)
    except UnsupportedProgramError:
        return []


def _nbytes(choice: Sequence[Option]) -> int:
    return sum(one.nbytes for one in choice)


def _fastest(frontiers: Sequence[Sequence[Option]], nbytes: int) -> list[Option]:
    """The fastest choice of one option per pair of loops that takes at most `nbytes`, or else the smallest choice.

    All pairs first pay the same price per byte. Then each pair in turn takes the room that the others leave.
    """
    found = [frontier[-1] for frontier in frontiers]
    if _nbytes(found) > nbytes:
        return found
    for price in PRICES:
        at_price = [min(frontier, key=lambda one: one.seconds + price * one.nbytes) for frontier in frontiers]
        if _nbytes(at_price) <= nbytes:
            found = at_price
            break
    for number, frontier in enumerate(frontiers):
        room = nbytes - _nbytes(found) + found[number].nbytes
        found[number] = next(one for one in frontier if one.nbytes <= room)
    return found


def _written(program: Program, loops: Sequence[Loop], choice: Sequence[Option], device: Device, moves: bool) -> Program:
    """The program with the chosen options; loops inside others have what a body has room for: the fewest bytes."""

    def decide(loop: Loop) -> Residuals:
        if loop in loops:
            return choice[loops.index(loop)].residuals
        return cheapest(loop, PRICES[-1], device, moves)

    return with_residuals(program, decide)
