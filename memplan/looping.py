"""A step whose loops stack less and less: what is cheaper to compute again than to keep is not stacked."""

from __future__ import annotations

from collections.abc import Sequence

from memplan.planning.cut import PRICES, cheapest
from memplan.planning.devices import Device
from memplan.planning.loop import Loop, Residuals, stacked_nbytes
from memplan.program.loops import pairs_of, with_residuals
from memplan.program.trace import Program


def ways(program: Program, device: Device, moves: bool) -> list[Program]:
    """The program with the residuals that some price per byte makes the cheapest; the fewest bytes on the device first.

    Empty where no loop reads what another stacks. With `moves`, only those ways that use the host.
    """
    loops = pairs_of(program)
    known: dict[Sequence[Residuals], float] = {}
    for price in PRICES if loops else ():
        chosen = tuple(cheapest(loop, price, device, moves) for loop in loops)
        if not moves or any(residuals.moved for residuals in chosen):
            known.setdefault(chosen, price)

    def at(price: float) -> Program:
        def decide(loop: Loop) -> Residuals:
            return cheapest(loop, price, device, moves)

        return with_residuals(program, decide)

    found = [at(price) for price in known.values()]
    return sorted(found, key=lambda way: sum(stacked_nbytes(loop, chosen) for loop, chosen in way.loops))
