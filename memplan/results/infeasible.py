"""Errors about memory, with advice: no plan fits, or XLA's pools cannot allocate."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from memplan.compilation.outcome import Explored, Outcome
from memplan.errors import (
    InfeasibleBudgetError,
    MemplanError,
    OutOfMemoryError,
    TimeLimitError,
)
from memplan.planning.floor import floor
from memplan.planning.slabs.slabs import Slabs
from memplan.program import compat
from memplan.program.loops.unplanned import Unplanned, unplanned
from memplan.program.ops import shape_of
from memplan.program.slabs.write import axis_at
from memplan.program.state.host_state import donation_pairs
from memplan.program.trace import InSlabs, Program
from memplan.report.decisions import LeftAsWritten
from memplan.report.model import of_pool
from memplan.report.slabs import Unsplit
from memplan.report.views.table import shape
from memplan.units import format_seconds, located, show_bytes
from memplan.xla import local
from memplan.xla.sources import Sources

# Plan for at most so many budgets to find one that works. Of 300 random programs, three did not fit
# the first budget, and one needed three.
_MAX_BUDGETS = 3
# After a budget that does not work, name the smallest plan of the unmodified step if that takes at
# most 1.5 times the next budget. For ResNet-50 at 8 %, the third budget worked (756 MiB) where that
# plan takes 875, and each budget took a minute of search.
_NEAR_UNMODIFIED = 1.5
_MAX_NAMED = 3  # operations, axes or places named in an error
# Name values that are not planned from 1 % of the budget on, as `results.findings` does.
_LEAST_SHARE = 0.01
_REQUEST = re.compile(r"allocate ([\d.]+) ?([KMGT]i)?(?:B|bytes)")
_PINNED_POOL = "xla_gpu_host_bfc"
_UNITS = {None: 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}


@dataclass(frozen=True)
class WorkingBudget:
    """A budget that works, and the predicted seconds of a step within it."""

    device_bytes: int
    step_s: float


def infeasible(
    outcome: Explored, smallest: WorkingBudget, splits: bool = True
) -> InfeasibleBudgetError:
    """The error for a step whose best program does not fit.

    Args:
      splits: slabs were allowed.
    """
    budget = outcome.limits.device_bytes
    pool = of_pool(outcome.limits.pool_share)
    floor_bytes, operation = floor_of(outcome)
    host = ""
    if outcome.host_bytes > outcome.limits.host_bytes:
        host = f", with {show_bytes(outcome.host_bytes)} on the host"
    resident = "arguments, outputs"
    if outcome.constant_bytes:
        resident = "arguments, constants, outputs"
    left = _left(outcome)
    advice = "\n  ".join(
        _advice(outcome, smallest.device_bytes, not splits and floor_bytes > budget, left)
    )
    baseline_step_s = outcome.unmodified.replay.step_s if outcome.unmodified else None
    seconds = _seconds(smallest.step_s, baseline_step_s)
    parts = _workspace(outcome) + _as_written(left) + (_in_slabs(outcome) if splits else "")
    return InfeasibleBudgetError(
        f"no plan fits {show_bytes(budget)}{pool} on {outcome.target.device.name}. The smallest "
        f"plan that was found takes {show_bytes(smallest.device_bytes)}{host}.{seconds} No order "
        f"of its kernels takes less than {show_bytes(floor_bytes)}: {resident} and the largest "
        f"kernel, {operation}.{parts} Try:\n  {advice}",
        floor_bytes=floor_bytes,
        smallest_bytes=smallest.device_bytes,
        operation=operation,
        smallest_step_s=smallest.step_s,
        baseline_step_s=baseline_step_s,
    )


def out_of_time(smallest: Explored, programs: int, time_limit_s: float | None) -> TimeLimitError:
    """The error for a step of which nothing fits when the time limit has passed.

    Args:
      smallest: the smallest program so far.
      programs: number of programs so far.
    """
    host = f" and {show_bytes(smallest.host_bytes)} on the host" if smallest.host_bytes else ""
    count = f"{programs} program{'s' * (programs != 1)}"
    return TimeLimitError(
        f"the time limit of {time_limit_s:g} s ended planning before a program was found that fits "
        f"{show_bytes(smallest.limits.device_bytes)} on {smallest.target.device.name}. {count} of "
        f"the step were tried; the smallest ({smallest.method}) takes "
        f"{show_bytes(smallest.device_bytes)}{host}. Try:\n  a longer time_limit, or none\n"
        f"  a budget of {smallest.device_bytes} bytes",
        smallest_bytes=smallest.device_bytes,
    )


def _seconds(step_s: float, baseline_step_s: float | None) -> str:
    """How long a step takes within the smallest budget; "" if as long as the unmodified step."""
    if step_s == baseline_step_s:
        return ""
    unplanned = ""
    if baseline_step_s is not None:
        unplanned = f"; without a plan, {format_seconds(baseline_step_s)}"
    return f" With it a step is predicted to take {format_seconds(step_s)}{unplanned}."


def working_budget(
    refused: Explored, plan_within: Callable[[int], Explored] | None
) -> WorkingBudget:
    """A budget that works: the bytes of a program that did not fit, or somewhat more.

    Args:
      plan_within: plans the step for another budget, which may choose other loops or slabs; None if
        the step follows a saved plan, or the program that did not fit is known to work.
    """
    plain = refused.unmodified or refused.planned.plain
    unplanned = WorkingBudget(plain.device_bytes, plain.replay.step_s)
    smallest = WorkingBudget(refused.device_bytes, refused.step_s)
    is_transformed = refused.program.rewritten is not None
    is_predicted = refused.device_bytes <= refused.planned.predicted_bytes
    if plan_within is None or (is_predicted and not is_transformed):
        return min(smallest, unplanned, key=lambda budget: budget.device_bytes)
    budget = smallest.device_bytes
    for _ in range(_MAX_BUDGETS):
        if budget >= unplanned.device_bytes:
            break
        outcome = plan_within(budget)
        if outcome.fits:
            return WorkingBudget(budget, outcome.step_s)
        budget = max(outcome.device_bytes, budget + 1)
        plan = refused.smallest_unmodified
        if plan is not None and plan.device_bytes <= _NEAR_UNMODIFIED * budget:
            return WorkingBudget(plan.device_bytes, plan.step_s)
    return unplanned


def floor_of(outcome: Explored) -> tuple[int, str]:
    """A lower bound of device bytes for any order, and the kernel that sets it, with its line."""
    smallest = outcome.planned.plain.rewrite(0)
    nbytes, kernel = floor(smallest.problem)
    # without the tables of pointers, which XLA:GPU counts and XLA:CPU does not
    nbytes -= smallest.problem.tables_nbytes
    floor_bytes = min(smallest.resident_bytes + nbytes, outcome.device_bytes)
    if kernel is None:
        return floor_bytes, "none"
    name = smallest.problem.kernels[kernel].name
    source = Sources(smallest.module).line(name)
    return floor_bytes, located(name, source)


def as_written(outcome: Outcome) -> tuple[LeftAsWritten, ...]:
    """The large values that parts of a planned step keep as the user wrote them."""
    if outcome.plan is None:
        return ()
    return tuple(
        LeftAsWritten(located(row.kind, row.source), row.nbytes, row.reason)
        for row in _left(outcome)
    )


def _left(outcome: Explored) -> list[Unplanned]:
    """What memplan leaves as the user wrote it, if it is large."""
    rows = unplanned(outcome.program.original)
    least_nbytes = _LEAST_SHARE * outcome.limits.device_bytes
    return [row for row in rows if row.nbytes >= least_nbytes][:_MAX_NAMED]


def _workspace(outcome: Explored) -> str:
    """The largest workspace of a library, and its kernel; '' if it is small."""
    plain = outcome.planned.plain
    kernel, nbytes = max(plain.workspaces.items(), key=itemgetter(1), default=("", 0))
    if not kernel or nbytes < _LEAST_SHARE * outcome.limits.device_bytes:
        return ""
    name = located(kernel, Sources(plain.module).line(kernel))
    return f" A library needs {show_bytes(nbytes)} of workspace for {name}."


def _as_written(left: Iterable[Unplanned]) -> str:
    """The values between parts of the step that stay as they are, and why."""
    return "".join(
        f" {show_bytes(row.nbytes)} that the {located(row.kind, row.source)} keeps for later are "
        f"not planned: {row.reason}."
        for row in left
    )


def _in_slabs(outcome: Explored) -> str:
    """The bytes of the best attempt in slabs, and the unsplit operations; '' if nothing splits."""
    attempt = outcome.closest_slab_attempt
    if attempt is None:
        axis = longest_axis(outcome.program.original)
        unsplittable = _too_large(outcome, [axis]) if axis else ""
        if not axis or not (unsplittable or axis.graph.along):
            return ""
        if not unsplittable:
            return " In slabs it may take less, but none were expected to fit this budget."
        return f" It cannot be split along {axis_of(axis)}: {unsplittable} cannot run in slabs."
    axes = list(dict.fromkeys(map(axis_of, attempt.in_slabs)))
    others = len(axes) - _MAX_NAMED
    named = [*axes[:_MAX_NAMED], *([f"{others} more"] if others > 0 else [])]
    text = f" In slabs along {', '.join(named)} it takes "
    text += show_bytes(attempt.device_bytes)
    if attempt.host_bytes:
        text += f" and {show_bytes(attempt.host_bytes)} on the host"
    unsplittable = _too_large(outcome, attempt.in_slabs)
    if unsplittable:
        text += f"; {unsplittable} cannot run in slabs"
    return f"{text}."


def _too_large(outcome: Explored, records: Sequence[InSlabs]) -> str:
    """Unsplit operations that exceed the budget, or whose effects need their full operands."""
    limit = outcome.limits.device_bytes - outcome.planned.plain.resident_bytes
    effects = {
        (op.name, op.source)
        for record in records
        for op in map(record.graph.graph.ops.__getitem__, record.blocked & record.graph.effects)
    }
    names = []
    for op in unsplit(records, _MAX_NAMED):
        if op.nbytes > limit or (op.name, op.source) in effects:
            names.append(located(op.name, op.source))
    return ", ".join(names)


def _advice(
    outcome: Explored, smallest: int, needs_slabs: bool, left: Iterable[Unplanned]
) -> Iterator[str]:
    limits = outcome.limits
    attempt = outcome.closest_slab_attempt
    if outcome.device_bytes > limits.device_bytes:
        yield f"a budget of {smallest} bytes"
    # Programs that fit the device but not the host.
    programs = [outcome, attempt] if attempt else [outcome]
    host_bytes = [
        program.host_bytes
        for program in programs
        if program.device_bytes <= limits.device_bytes and program.host_bytes > limits.host_bytes
    ]
    if host_bytes:
        yield f"a host_budget of {min(host_bytes)} bytes"
    for row in left:
        if row.may_checkpoint:
            yield (
                f"jax.checkpoint around the body of the {located(row.kind, row.source)}: it "
                f"computes up to {show_bytes(row.nbytes)} again"
            )
    if needs_slabs:
        yield 'split="auto": kernels that do not fit then run in slabs'
    constant_bytes = outcome.constant_bytes
    if constant_bytes:
        yield (
            "arguments instead of arrays that the step closes over: these are "
            f"{show_bytes(constant_bytes)} of constants, which can be neither donated nor kept on "
            "the host"
        )
    resident = outcome.planned.plain.resident_bytes - constant_bytes
    if 2 * resident > limits.device_bytes:
        if _may_donate_more(outcome.program):
            yield (
                "donate_argnums for the state that the step replaces: the new value then reuses "
                "the old buffer"
            )
        if not outcome.program.on_host and outcome.target.backend.has_own_memory:
            yield f"host_state: arguments and outputs take {show_bytes(resident)} of the budget"
    if outcome.program.pins:
        yield "fewer values pinned to the device"
    yield "a smaller batch or image: memplan.largest finds the largest that fits"


def _may_donate_more(program: Program) -> bool:
    """Is there a result without a donated buffer, and an undonated argument of its type?"""
    inputs = program.traced.jaxpr.jaxpr.invars
    outputs = program.traced.jaxpr.jaxpr.outvars
    donated = [position for position, is_donated in enumerate(program.donated) if is_donated]
    replaced = {number for number, _ in donation_pairs(inputs, outputs, donated)}
    new_outputs = [atom for number, atom in enumerate(outputs) if number not in replaced]
    undonated = {*range(len(inputs))}.difference(donated)
    return bool([*donation_pairs(inputs, new_outputs, undonated)])


def unsplit(records: Iterable[InSlabs], count: int) -> tuple[Unsplit, ...]:
    """The largest operations that could not be split along an axis of their operands.

    Each line of code occurs once.
    """
    largest: dict[tuple[str, str], Unsplit] = {}
    for record in records:
        graph = record.graph.graph
        blocked = map(graph.ops.__getitem__, record.blocked)
        rows = [Unsplit(op.name, graph.touched_nbytes(op), op.source) for op in blocked]
        for row in sorted(rows, key=lambda row: -row.nbytes):
            largest.setdefault((row.name, row.source), row)
    return tuple(sorted(largest.values(), key=lambda row: -row.nbytes)[:count])


def longest_axis(program: Program) -> InSlabs | None:
    """The axis of a step's largest array with the most bytes, unsplit; None without arrays."""
    values = program.flat.values
    sizes = [compat.nbytes_of(value.aval) for value in values]
    if not sizes:
        return None
    value = sizes.index(max(sizes))
    dims = [dim for dim, size in enumerate(shape_of(values[value])) if size > 1]
    if not dims:
        return None
    axes = {dim: axis_at(program.flat, value, dim) for dim in dims}
    dim = max(dims, key=lambda dim: sum(map(axes[dim].graph.graph.nbytes, axes[dim].graph.sizes)))
    axis = axes[dim]
    none = frozenset[int]()
    begins = axis.flat.number_of[values[value]]
    return InSlabs(Slabs(value, dim, 1, none, none, none), axis.graph, begins, (), axis.blocked)


def axis_of(record: InSlabs) -> str:
    """The array and the dimension where an axis starts, as text."""
    array = record.graph.graph.values[record.begins]
    inside = f" in the {record.where}" if record.where else ""
    return f"dimension {record.transform.dim} of {shape(array.shape, array.dtype)}{inside}"


def refuse_host_memory_on_device(host_bytes: int) -> None:
    """Refuse a step of the local GPU that keeps values on the host, if XLA has no memory there.

    Raises:
      MemplanError: names the setting that makes XLA allocate host memory on the device.
    """
    setting = local.without_spaces()
    if host_bytes and setting:
        raise MemplanError(
            f"with {setting}, XLA allocates host memory on the GPU, so the "
            f"{show_bytes(host_bytes)} that this step keeps on the host would be on the device. "
            "Start Python without it, or plan with host_budget=0."
        )


def no_block(needed_bytes: int, pool: local.Room) -> OutOfMemoryError:
    """The error if a step is not started because no free block holds its temporaries."""
    advice = "\n  ".join(_advice_on_pools())
    return OutOfMemoryError(
        "the step was not started, and its arguments are unchanged. Its temporaries need one block "
        f"of {show_bytes(needed_bytes)}, but {_state_of(pool)}. Try:\n  {advice}",
        needed_bytes=needed_bytes,
        free_bytes=pool.block_bytes,
    )


def out_of_memory(error: Exception, donated: Sequence[Any]) -> OutOfMemoryError | None:
    """memplan's error for XLA's out-of-memory error; None for another error.

    Args:
      donated: arguments that were donated to the step.
    """
    text = str(error)
    if "RESOURCE_EXHAUSTED" not in text:
        return None
    request = _REQUEST.search(text)
    needed = int(float(request[1]) * _UNITS[request[2]]) if request else None
    memory = f"a block of {show_bytes(needed)}" if needed else "the memory that it needs"
    lost = sum(leaf.is_deleted() for leaf in donated)
    arguments = "its arguments are unchanged"
    if lost:
        arguments = (
            f"{lost} of its {len(donated)} donated arguments are lost: continue from a checkpoint"
        )
    if _PINNED_POOL in text:
        limit = local.pools().host_limit_bytes
        gib = 1 + max(limit, needed or 0) // 2**30
        return OutOfMemoryError(
            f"the step failed: XLA could not allocate {memory} of pinned host memory. XLA's pinned "
            f"pool is limited to {show_bytes(limit)} per GPU, and no block spans two of its "
            f"regions; {arguments}. Try:\n  before Python starts, "
            f"{local.export(local.HOST_LIMIT, str(gib))} or more\n  a lower host_budget",
            needed_bytes=needed,
        )
    pool = local.room()
    state = text.partition(": ")[2].partition("\n")[0].partition(" [")[0]
    if pool:
        state = _state_of(pool)
    advice = "\n  ".join(_advice_on_pools())
    return OutOfMemoryError(
        f"the step failed: XLA could not allocate {memory} on the device, and {state}; "
        f"{arguments}. Try:\n  {advice}",
        needed_bytes=needed,
        free_bytes=pool.block_bytes if pool else None,
    )


def _state_of(pool: local.Room) -> str:
    return (
        f"the largest free block in the device's pool is {show_bytes(pool.block_bytes)}: "
        f"{show_bytes(pool.in_use_bytes)} of {show_bytes(pool.limit_bytes)} are in use"
    )


def _advice_on_pools() -> Iterator[str]:
    yield "free arrays that the step does not need: drop references, or call array.delete()"
    yield (
        "put the state and the batch on the device before anything else: an array between free "
        "parts keeps them apart"
    )
    if not local.pools().preallocates:
        yield (
            f"before Python starts: {local.export(local.PREALLOCATE, 'true')}. The pool is then "
            "one region instead of several, which no block spans"
        )
    yield "a lower budget, for smaller temporaries"
