"""What to say where not even the least that was found fits: the floor, the kernel that sets it, what to try."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from memplan.compilation.outcome import Outcome
from memplan.errors import InfeasibleBudgetError
from memplan.outcome.slabs import axis_of, longest_axis, unsplit
from memplan.planning.floor import floor
from memplan.program.trace import InSlabs
from memplan.units import show_bytes
from memplan.xla.sources import sources

_MOST_NAMED = 3  # operations in an error


def infeasible(found: Outcome, splits: bool = True) -> InfeasibleBudgetError:
    """The error for an outcome that does not fit.

    Args:
      splits: slabs were allowed.
    """
    plain, budget = found.planned.plain, found.limits.device_bytes
    floor_bytes, operation = floor_of(found)
    smallest = min(found.device_bytes, plain.device_bytes)
    host = "" if found.host_bytes <= found.limits.host_bytes else f", with {show_bytes(found.host_bytes)} on the host"
    resident = "arguments, constants, outputs" if found.executable.memory.constant_bytes else "arguments, outputs"
    advice = "\n  ".join(_advice(found, not splits and floor_bytes > budget))
    return InfeasibleBudgetError(
        f"no plan fits {show_bytes(budget)} on {found.target.device.name}. The smallest that was found, and compiled, "
        f"takes {show_bytes(smallest)}{host}; {resident} and the largest kernel alone, {operation}, take "
        f"{show_bytes(floor_bytes)}.{_in_slabs(found) if splits else ''} Try:\n  {advice}",
        floor_bytes=floor_bytes,
        smallest_bytes=smallest,
        operation=operation,
    )


def _enough_on_the_host(found: Outcome) -> int | None:
    """Host bytes with which something that was compiled fits; None where they are not what it lacks."""
    attempt = found.closest_slab_attempt
    known = [(found.device_bytes, found.host_bytes), *([(attempt.device_bytes, attempt.host_bytes)] if attempt else [])]
    fitting = [host for device, host in known if device <= found.limits.device_bytes]
    return min((host for host in fitting if host > found.limits.host_bytes), default=None)


def floor_of(found: Outcome) -> tuple[int, str]:
    """Device bytes that no order goes below, and the kernel that sets them, with its `file:line`."""
    least = found.planned.plain.rewrite(0)
    nbytes, kernel = floor(least.problem)
    name = least.problem.kernels[kernel].name
    where = sources(least.module).get(name, "")
    floor_bytes = min(least.resident_bytes + nbytes, found.device_bytes)  # small tables are counted as XLA:GPU has them
    return floor_bytes, f"{name} ({where})" if where else name


def _in_slabs(found: Outcome) -> str:
    """What came of slabs, and what stood in their way; '' where there is nothing to tell."""
    attempt = found.closest_slab_attempt
    if attempt is None:
        axis = longest_axis(found.program.original) if found.program.spmd is None else None
        whole = _in_the_way(found, [axis]) if axis else ""
        return f" It cannot be split along {axis_of(axis)}: not in slabs is {whole}." if axis and whole else ""
    host = f" and {show_bytes(attempt.host_bytes)} on the host" if attempt.host_bytes else ""
    axes = ", ".join(map(axis_of, attempt.in_slabs))
    whole = _in_the_way(found, attempt.in_slabs)
    rest = f"; not in slabs is {whole}" if whole else ""
    return f" In slabs along {axes} it takes {show_bytes(attempt.device_bytes)}{host}{rest}."


def _in_the_way(found: Outcome, records: Sequence[InSlabs]) -> str:
    """Operations that do not fit whole, and are not split."""
    room = found.limits.device_bytes - found.planned.plain.resident_bytes
    large = [one for one in unsplit(records, _MOST_NAMED) if one.nbytes > room]
    return ", ".join(f"{one.name} ({one.source})" if one.source else one.name for one in large)


def _advice(found: Outcome, needs_slabs: bool) -> Iterator[str]:
    if found.device_bytes > found.limits.device_bytes:
        yield f"a budget of {found.device_bytes} bytes"
    host_bytes = _enough_on_the_host(found)
    if host_bytes is not None:
        yield f"a host_budget of {host_bytes} bytes"
    if needs_slabs and found.program.spmd is None:
        yield 'split="auto": a kernel that does not fit is then run slab by slab'
    constant_bytes = found.executable.memory.constant_bytes
    if constant_bytes:
        yield (
            "arguments in place of arrays that the step closes over: they are constants of the compiled step, "
            f"{show_bytes(constant_bytes)} that can be neither donated nor kept on the host"
        )
    resident = found.planned.plain.resident_bytes - constant_bytes
    if 2 * resident > found.limits.device_bytes:
        if not all(found.program.donated):
            yield "donate_argnums for the state that the step replaces: its new value then takes the old one's place"
        if not found.program.on_host and found.target.is_gpu:
            yield f"host_state: arguments and outputs take {show_bytes(resident)} of it"
    yield "a smaller batch or image: memplan.largest finds the largest that fits"
