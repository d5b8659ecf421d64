"""What to say where not even the least that was found fits: the floor, the kernel that sets it, what to try."""

from __future__ import annotations

from collections.abc import Iterator

from memplan.compilation.outcome import Outcome
from memplan.errors import InfeasibleBudgetError
from memplan.planning.floor import floor
from memplan.units import show_bytes
from memplan.xla.sources import sources


def infeasible(found: Outcome) -> InfeasibleBudgetError:
    """The error for an outcome that does not fit."""
    plain, budget = found.planned.plain, found.limits.device_bytes
    floor_bytes, operation = floor_of(found)
    smallest = min(found.device_bytes, plain.device_bytes)
    host = "" if found.host_bytes <= found.limits.host_bytes else f", with {show_bytes(found.host_bytes)} on the host"
    advice = "\n  ".join(_advice(found))
    return InfeasibleBudgetError(
        f"no plan fits {show_bytes(budget)} on {found.target.device.name}. The smallest that was found, and compiled, "
        f"takes {show_bytes(smallest)}{host}; arguments, outputs and the largest kernel alone, {operation}, take "
        f"{show_bytes(floor_bytes)}. Try:\n  {advice}",
        floor_bytes=floor_bytes,
        smallest_bytes=smallest,
        operation=operation,
    )


def floor_of(found: Outcome) -> tuple[int, str]:
    """Device bytes that no order goes below, and the kernel that sets them, with its `file:line`."""
    least = found.planned.plain.rewrite(0)
    nbytes, kernel = floor(least.problem)
    name = least.problem.kernels[kernel].name
    where = sources(least.module).get(name, "")
    floor_bytes = min(least.resident_bytes + nbytes, found.device_bytes)  # small tables are counted as XLA:GPU has them
    return floor_bytes, f"{name} ({where})" if where else name


def _advice(found: Outcome) -> Iterator[str]:
    yield f"a budget of {found.device_bytes} bytes"
    resident = found.planned.plain.resident_bytes
    if 2 * resident > found.limits.device_bytes:
        if not all(found.program.donated):
            yield "donate_argnums for the state that the step replaces: its new value then takes the old one's place"
        if not found.program.on_host and found.target.is_gpu:
            yield f"host_state: arguments and outputs take {show_bytes(resident)} of it"
    yield "a smaller batch or image: memplan.largest finds the largest that fits"
