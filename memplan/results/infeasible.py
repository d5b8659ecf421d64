"""Errors about memory, with advice: no plan fits the budget, or XLA's pools cannot allocate a step's memory."""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from memplan.compilation.outcome import Outcome
from memplan.errors import InfeasibleBudgetError, OutOfMemoryError
from memplan.planning.floor import floor
from memplan.planning.slabs.slabs import Slabs
from memplan.program import compat
from memplan.program.ops import shape_of
from memplan.program.slabs.write import axis_at
from memplan.program.state.host_state import donation_pairs
from memplan.program.trace import InSlabs, Program
from memplan.report.slabs import Unsplit
from memplan.report.views.table import shape
from memplan.units import show_bytes
from memplan.xla import local
from memplan.xla.sources import Sources

_MOST_NAMED = 3  # operations named in an error
_ASKED = re.compile(r"allocate ([\d.]+) ?([KMGT]i)?(?:B|bytes)")
_PINNED_POOL = "xla_gpu_host_bfc"
_UNITS = {None: 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}


def infeasible(found: Outcome, smallest: int, splits: bool = True) -> InfeasibleBudgetError:
    """The error for an outcome that does not fit.

    Args:
      smallest: bytes of a budget that works.
      splits: slabs were allowed.
    """
    budget = found.limits.device_bytes
    floor_bytes, operation = floor_of(found)
    host = "" if found.host_bytes <= found.limits.host_bytes else f", with {show_bytes(found.host_bytes)} on the host"
    resident = "arguments, constants, outputs" if found.executable.memory.constant_bytes else "arguments, outputs"
    advice = "\n  ".join(_advice(found, smallest, not splits and floor_bytes > budget))
    return InfeasibleBudgetError(
        f"no plan fits {show_bytes(budget)} on {found.target.device.name}. The smallest plan that was found and "
        f"compiled takes {show_bytes(smallest)}{host}. The floor is {show_bytes(floor_bytes)}: {resident} and the "
        f"largest kernel, {operation}.{_in_slabs(found) if splits else ''} Try:\n  {advice}",
        floor_bytes=floor_bytes,
        smallest_bytes=smallest,
        operation=operation,
    )


def floor_of(found: Outcome) -> tuple[int, str]:
    """A lower bound of device bytes for any order, and the kernel that sets it, with its `file:line`."""
    least = found.planned.plain.rewrite(0)
    nbytes, kernel = floor(least.problem)
    floor_bytes = min(least.resident_bytes + nbytes, found.device_bytes)  # small tables are counted as XLA:GPU's
    if kernel is None:
        return floor_bytes, "none"
    name = least.problem.kernels[kernel].name
    where = Sources(least.module).line(name)
    return floor_bytes, f"{name} ({where})" if where else name


def _in_slabs(found: Outcome) -> str:
    """The bytes of the best attempt in slabs, and the operations that could not be split; '' if there was none."""
    attempt = found.closest_slab_attempt
    if attempt is None:
        axis = longest_axis(found.program.original)
        whole = _too_large(found, [axis]) if axis else ""
        return f" It cannot be split along {axis_of(axis)}: {whole} cannot run in slabs." if axis and whole else ""
    host = f" and {show_bytes(attempt.host_bytes)} on the host" if attempt.host_bytes else ""
    axes = ", ".join(map(axis_of, attempt.in_slabs))
    whole = _too_large(found, attempt.in_slabs)
    rest = f"; {whole} cannot run in slabs" if whole else ""
    return f" In slabs along {axes} it takes {show_bytes(attempt.device_bytes)}{host}{rest}."


def _too_large(found: Outcome, records: Sequence[InSlabs]) -> str:
    """Operations that are not split and do not fit whole, or have effects and keep whole what they read."""
    room = found.limits.device_bytes - found.planned.plain.resident_bytes
    graphs = [(one.graph, one.blocked & one.graph.effects) for one in records]
    effects = {(op.name, op.source) for graph, numbers in graphs for op in map(graph.graph.ops.__getitem__, numbers)}
    large = [one for one in unsplit(records, _MOST_NAMED) if one.nbytes > room or (one.name, one.source) in effects]
    return ", ".join(f"{one.name} ({one.source})" if one.source else one.name for one in large)


def _advice(found: Outcome, smallest: int, needs_slabs: bool) -> Iterator[str]:
    limits, attempt = found.limits, found.closest_slab_attempt
    if found.device_bytes > limits.device_bytes:
        yield f"a budget of {smallest} bytes"
    # Host bytes of the programs that fit the device but not the host.
    compiled = [
        (found.device_bytes, found.host_bytes),
        *([(attempt.device_bytes, attempt.host_bytes)] if attempt else []),
    ]
    enough = [host for device, host in compiled if device <= limits.device_bytes and host > limits.host_bytes]
    if enough:
        yield f"a host_budget of {min(enough)} bytes"
    if needs_slabs:
        yield 'split="auto": kernels that do not fit then run in slabs'
    constant_bytes = found.executable.memory.constant_bytes
    if constant_bytes:
        yield (
            f"arguments instead of arrays that the step closes over: these are {show_bytes(constant_bytes)} of "
            "constants, which can be neither donated nor kept on the host"
        )
    resident = found.planned.plain.resident_bytes - constant_bytes
    if 2 * resident > limits.device_bytes:
        if _may_donate_more(found.program):
            yield ("donate_argnums for the state that the step replaces: the new value then reuses the old buffer")
        if not found.program.on_host and found.target.is_gpu:
            yield f"host_state: arguments and outputs take {show_bytes(resident)} of the budget"
    if found.program.pins:
        yield "fewer values pinned to the device"
    yield "a smaller batch or image: memplan.largest finds the largest that fits"


def _may_donate_more(program: Program) -> bool:
    """Is there a result without a donated buffer, and an argument of its type that is not donated?"""
    inputs, outputs = program.traced.jaxpr.jaxpr.invars, program.traced.jaxpr.jaxpr.outvars
    donated = [position for position, given in enumerate(program.donated) if given]
    taken = {number for number, _ in donation_pairs(inputs, outputs, donated)}
    others = [atom for number, atom in enumerate(outputs) if number not in taken]
    return bool([*donation_pairs(inputs, others, {*range(len(inputs))}.difference(donated))])


def unsplit(records: Iterable[InSlabs], most: int) -> tuple[Unsplit, ...]:
    """The largest operations that read arrays of an axis and could not be split along it, each line of code once."""
    found: dict[tuple[str, str], Unsplit] = {}
    for one in records:
        graph = one.graph.graph
        rows = (Unsplit(op.name, graph.touched_nbytes(op), op.source) for op in map(graph.ops.__getitem__, one.blocked))
        for row in sorted(rows, key=lambda row: -row.nbytes):
            found.setdefault((row.name, row.source), row)
    return tuple(sorted(found.values(), key=lambda row: -row.nbytes)[:most])


def longest_axis(program: Program) -> InSlabs | None:
    """The axis of a step's largest array with the most bytes on it, with nothing in slabs; None without arrays."""
    known = program.flat.values
    value = max(range(len(known)), key=lambda number: compat.nbytes_of(known[number].aval), default=None)
    dims = [dim for dim, size in enumerate(shape_of(known[value])) if size > 1] if value is not None else []
    if value is None or not dims:
        return None
    axes = {dim: axis_at(program.flat, value, dim) for dim in dims}
    dim = max(dims, key=lambda dim: sum(map(axes[dim].graph.graph.nbytes, axes[dim].graph.sizes)))
    axis, none = axes[dim], frozenset[int]()
    begins = axis.flat.number_of[known[value]]
    return InSlabs(Slabs(value, dim, 1, none, none, none), axis.graph, begins, (), axis.blocked)


def axis_of(one: InSlabs) -> str:
    """The array and the dimension where an axis begins, as text."""
    array = one.graph.graph.values[one.begins]
    inside = f" in the {one.where}" if one.where else ""
    return f"dimension {one.slabs.dim} of {shape(array.shape, array.dtype)}{inside}"


def no_block(needed_bytes: int, room: local.Room) -> OutOfMemoryError:
    """The error if a step is not started because no block holds its temporaries."""
    return OutOfMemoryError(
        f"the step was not started, and its arguments are unchanged. Its temporaries need one block of "
        f"{show_bytes(needed_bytes)}, but {_there(room)}. Try:\n  " + "\n  ".join(_advice_on_pools()),
        needed_bytes=needed_bytes,
        free_bytes=room.block_bytes,
    )


def out_of_memory(error: Exception, donated: Sequence[Any]) -> OutOfMemoryError | None:
    """XLA's out-of-memory error as memplan's; None for another error.

    Args:
      donated: arguments that were donated to the step.
    """
    text = str(error)
    if "RESOURCE_EXHAUSTED" not in text:
        return None
    asked = _ASKED.search(text)
    needed = int(float(asked[1]) * _UNITS[asked[2]]) if asked else None
    what = f"a block of {show_bytes(needed)}" if needed else "the memory that it needs"
    lost = sum(leaf.is_deleted() for leaf in donated)
    state = (
        f"{lost} of its {len(donated)} donated arguments are lost: continue from a checkpoint"
        if lost
        else "its arguments are unchanged"
    )
    if _PINNED_POOL in text:
        limit = local.pools().host_limit_bytes
        enough = 1 + max(limit, needed or 0) // 2**30
        return OutOfMemoryError(
            f"the step failed: XLA could not allocate {what} of pinned host memory. XLA's pinned pool is limited to "
            f"{show_bytes(limit)} per GPU, and no block spans two of its regions; {state}. Try:\n  "
            f"before Python starts, {local.export(local.HOST_LIMIT, str(enough))} or more\n  a lower host_budget",
            needed_bytes=needed,
        )
    room = local.room()
    there = _there(room) if room else text.partition(": ")[2].partition("\n")[0].partition(" [")[0]
    return OutOfMemoryError(
        f"the step failed: XLA could not allocate {what} on the device, and {there}; {state}. Try:\n  "
        + "\n  ".join(_advice_on_pools()),
        needed_bytes=needed,
        free_bytes=room.block_bytes if room else None,
    )


def _there(room: local.Room) -> str:
    return (
        f"the largest free block in the device's pool is {show_bytes(room.block_bytes)}: "
        f"{show_bytes(room.in_use_bytes)} of {show_bytes(room.limit_bytes)} are in use"
    )


def _advice_on_pools() -> Iterator[str]:
    yield "free arrays that the step does not need: drop references, or call array.delete()"
    yield "put the state and the batch on the device before anything else: an array between free parts keeps them apart"
    if not local.pools().preallocates:
        yield (
            f"before Python starts: {local.export(local.PREALLOCATE, 'true')}. The pool is then one region instead of "
            "several, which no block spans"
        )
    yield "a lower budget, for smaller temporaries"
