"""Builds the report of an outcome from the compiled and the planned module."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax

from memplan import io
from memplan.compilation.compiler import compile_program
from memplan.compilation.outcome import Outcome, Restored
from memplan.compilation.scheduled import ScheduledModule
from memplan.planning.problem import Role
from memplan.planning.schedule import Kind
from memplan.planning.slabs.slabs import slab_rows, trips_of
from memplan.program import compat
from memplan.program.loops.residuals import outer_loops
from memplan.program.pins import own_checkpoints
from memplan.program.trace import InSlabs
from memplan.report.mesh import CollectiveRow, Link, Mesh
from memplan.report.model import Candidate, LiveValue, Pinned, Report
from memplan.report.slabs import SlabArray, SlabLoop
from memplan.results.decisions import decisions_of
from memplan.results.findings import counted
from memplan.results.infeasible import axis_of, floor_of, unsplit
from memplan.results.memory import Origins, line, peak_lifetimes, timeline
from memplan.xla import local
from memplan.xla.buffers import instruction_of
from memplan.xla.collectives.cost import Collective
from memplan.xla.cuda_graphs import has_own_rule, launches
from memplan.xla.host_copies import transfers
from memplan.xla.local import Taken, least_limit
from memplan.xla.module import Module, read_module
from memplan.xla.sources import constants, layer_of
from memplan.xla.target import Target, rematerializes_above, without_messages
from memplan.xla.write import original

_MOST_UNSPLIT = 30  # operations outside of slabs
_REMATERIALIZES = b"hlo_rematerialization.cc", b"gpu_hlo_schedule.cc"  # they print that a step is too large
_HUGE = 2**31  # elements: cuDNN counts in int32


def report_of(outcome: Outcome) -> Report:
    """The report of a compiled step."""
    planned, plain, result = outcome.planned, outcome.planned.plain, outcome.planned.result
    origins = Origins(planned.base.module)
    decisions = tuple(sorted(decisions_of(outcome, origins), key=lambda one: -one.nbytes))
    by_buffer = {one.name: one.decision for one in decisions}
    memory = timeline(result, origins, by_buffer)
    step, unmodified = result.replay, outcome.unmodified
    peak = memory.instants[memory.peak] if memory.instants else None
    if unmodified is None:
        lines = ()
    elif unmodified is result:
        lines = (line("unmodified step", memory),)
    else:
        lines = (line("unmodified step", timeline(unmodified, Origins(unmodified.module), {})),)
    loops = [op for op in result.module.instructions.values() if op.opcode == "while"]
    moved = {loop.name: transfers(result.module, loop, result.device) for loop in loops}
    of_outer = [moved[name] for name in result.module.entry.ops if name in moved]  # with those of loops inside
    return Report(
        device=outcome.target.device.name,
        runs_on=jax.devices()[0].device_kind,
        status=status_of(outcome),
        planner=outcome.plan.planner if outcome.plan is not None else "none",
        budget_bytes=outcome.limits.device_bytes,
        host_budget_bytes=outcome.limits.host_bytes,
        baseline_peak_bytes=unmodified.device_bytes if unmodified else None,
        predicted_peak_bytes=planned.predicted_bytes,
        compiled_peak_bytes=outcome.device_bytes,
        observed_peak_bytes=None,
        host_peak_bytes=outcome.host_bytes,
        offloaded_bytes=step.copied_out_nbytes,
        recomputed_flops=max(0.0, step.flops - (unmodified or plain).replay.flops),
        baseline_step_s=unmodified.replay.step_s if unmodified else None,
        predicted_step_s=step.step_s,
        floor_bytes=floor_of(outcome)[0],
        lower_bound_s=planned.bound_s,
        gap_s=max(0.0, step.step_s - planned.bound_s),
        attempts=outcome.compilations,
        copy_s=step.copy_s,
        hidden_copy_s=step.hidden_copy_s,
        stall_s=sum(end - start for start, end in step.stalls),
        decisions=decisions,
        live_at_peak=_live_at_peak(outcome, origins, by_buffer),
        candidates=tuple(_candidates(outcome)),
        versions=versions(),
        timeline=memory,
        lines=lines,
        planning_s=planned.planning_s,
        preparation_s=outcome.seconds,
        xla_limit_bytes=_xla_limit(outcome.target, unmodified or plain) if outcome.target.is_gpu else None,
        slab_loops=tuple(_slab_loops(outcome, origins, moved)),
        loop_copies=sum(copies for copies, _ in of_outer),
        loop_kernels=sum(kernels for _, kernels in of_outer),
        unsplit=unsplit(outcome.program.in_slabs, _MOST_UNSPLIT),
        constant_bytes=outcome.executable.memory.constant_bytes,
        huge_arrays=_huge_arrays(unmodified) if unmodified and outcome.target.is_gpu else None,
        mesh=_mesh(outcome),
        pins=tuple(_pinned(outcome)),
        checkpoints=tuple(own_checkpoints(outcome.program.traced.jaxpr)),
        peak_kernel=", ".join(filter(None, (peak.layer or peak.name, peak.source))) if peak else "",
        findings=counted(outcome),
        **_counts(outcome),
        **_pooled(outcome),
        **_by_jit(outcome),
    )


def _mesh(outcome: Outcome) -> Mesh | None:
    machine, division = outcome.program.machine, outcome.program.traced.division
    if machine is None or division is None:
        return None
    replay = outcome.planned.result.replay
    alike: dict[tuple[str, tuple[str, ...]], list[tuple[Collective, int]]] = defaultdict(list)
    for one, count in replay.collectives.items():
        alike[one.kind, one.axes].append((one, count))
    rows = (
        CollectiveRow(
            kind,
            over,
            sum(count for _, count in some),
            sum(round(count * one.outside_nbytes) for one, count in some),
            sum(round(count * one.inside_nbytes) for one, count in some),
            sum(count * one.seconds for one, count in some),
        )
        for (kind, over), some in alike.items()
    )
    return Mesh(
        axes=tuple({name: size for mesh in division.meshes for name, size in mesh.shape.items()}.items()),
        topology=machine.topology.name,
        links=tuple(Link(axis.name, axis.size, axis.bandwidth, axis.shared) for axis in machine.topology.axes),
        collectives=tuple(sorted(rows, key=lambda row: -row.seconds)),
        collective_s=replay.collective_s,
        hidden_s=replay.hidden_collective_s,
    )


def status_of(outcome: Outcome | Restored) -> str:
    """The value of `Report.status`, without compiling the plain step, as a report may."""
    if not outcome.fits:
        return "does not fit"
    return "untouched" if outcome.plan is None else "fits"


def versions() -> tuple[tuple[str, str], ...]:
    """Versions of all packages that change the figures."""
    return io.versions("memplan", "jax", "jaxlib")


def _candidates(outcome: Outcome) -> Iterator[Candidate]:
    plain = outcome.unmodified
    if outcome.plan is not None and plain is not None:
        verdict = "fits" if outcome.limits.allow(plain.device_bytes, 0) else "over the device budget"
        yield Candidate("plain", plain.device_bytes, 0, plain.replay.step_s, verdict)
    for one in outcome.others:
        verdict = "slower" if one.fits else "does not fit"
        yield Candidate(one.way, one.device_bytes, one.host_bytes, one.step_s, verdict)
    verdict = "chosen" if outcome.fits else "does not fit"
    yield Candidate(outcome.way, outcome.device_bytes, outcome.host_bytes, outcome.step_s, verdict)


def _pinned(outcome: Outcome) -> Iterator[Pinned]:
    program = outcome.program
    loops = [loop for loop, _ in program.loops] or (outer_loops(program.original) if program.pins else [])
    for pin in program.pins:
        nbytes = [one.nbytes for one in outcome.planned.base.problem.buffers if one.pin == pin]
        nbytes += [
            loop.trips * loop.body.nbytes(value) for loop in loops for value, known in loop.pins.items() if known == pin
        ]
        yield Pinned(pin.name, pin.where.value, len(nbytes), sum(nbytes))


def _slab_loops(outcome: Outcome, origins: Origins, moved: Mapping[str, tuple[int, int]]) -> Iterator[SlabLoop]:
    """One row per loop over slabs.

    Args:
      moved: loop of the compiled program -> transfers between device and host per trip (`transfers`).
    """
    program, blocks = outcome.program, outcome.planned.result.replay.blocks
    records = program.in_slabs
    compiled = {origins.scope(name).rpartition("/")[2]: name for name in moved}
    inputs = compat.input_names(program.traced.jaxpr) if records else ()  # names of the first values of every graph

    def array(one: InSlabs, value: int) -> SlabArray:
        known = one.graph.graph.values[value]
        name = inputs[value] if value < len(inputs) and not one.slabs.inside else known.name
        on_host = value in one.slabs.on_host or value in program.on_host
        return SlabArray(name, known.shape, known.dtype, known.nbytes, "host" if on_host else "device")

    numbered = ((record, *each) for record in records for each in enumerate(record.loops, record.first))
    for one, number, loop in numbered:
        graph, made = one.graph.graph, compiled.get(one.scope(number), "")
        copies, kernels = moved.get(made, (0, 0))
        spans = [(loop.spans[value], slab_rows(one.graph, one.slabs, value)) for value in loop.reads]
        yield SlabLoop(
            number=number,
            axis=axis_of(one),
            trips=trips_of(one.graph, one.slabs),
            rows=one.slabs.rows,
            halo=max((max(-low, high - rows, 0) for (low, high), rows in spans), default=0),
            ops=len(loop.ops),
            reads=tuple(array(one, value) for value in loop.reads),
            writes=tuple(array(one, value) for value in loop.writes),
            sums=len(loop.sums),
            seconds=blocks.get(made),
            source=graph.ops[loop.largest_op(graph)].source,
            copies=copies,
            kernels=kernels,
        )


def _live_at_peak(outcome: Outcome, origins: Origins, by_buffer: Mapping[str, str]) -> tuple[LiveValue, ...]:
    """What is on the device at its peak: temporaries, arguments, outputs of their own and constants."""
    result = outcome.planned.result
    problem = result.problem
    given = {one.alias_set for one in problem.buffers if one.role is Role.ARGUMENT}

    def rows() -> Iterator[LiveValue]:
        for one in peak_lifetimes(result):
            name = problem.buffers[one.buffer].name
            yield row(name, one.nbytes, origins.source(name))
        for one in problem.buffers:
            if one.role is Role.ARGUMENT:
                yield row(one.name, one.nbytes, "argument")
            elif one.role is Role.OUTPUT and one.alias_set not in given:
                made = row(one.name, one.nbytes, origins.source(one.name))
                yield replace(made, name=f"{made.name}, an output")
        for op, source in constants(outcome.planned.base.module):
            yield LiveValue(f"{op.name}, a constant", op.nbytes, op.result[0].in_numpy, source, "")

    def row(name: str, nbytes: int, source: str) -> LiveValue:
        instruction = instruction_of(name)
        shown = layer_of(origins.scope(name)) or name
        base = original(instruction)
        decision = by_buffer.get(name) or by_buffer.get(name.replace(instruction, base), "")
        return LiveValue(shown, nbytes, origins.shape(name), source, decision)

    return tuple(sorted(rows(), key=lambda one: -one.nbytes))


def _counts(outcome: Outcome) -> dict[str, int]:
    """Counts in the compiled program: instructions rematerialized by XLA, launches, planned copies, recomputations."""
    is_gpu, is_planned = outcome.target.is_gpu, outcome.planned.plan is not None
    if not is_gpu and not is_planned:
        return {}
    compiled = read_module(outcome.executable.text)
    counts = {}
    if is_gpu:
        counts["xla_rematerialized"] = _rematerialized(compiled, outcome.planned.result.module)
        own_rule = has_own_rule(outcome.program.options.get("compiler_options") or {})
        if not own_rule and (found := launches(compiled, outcome.target.device)):
            counts |= {"cuda_graphs": found.graphs, "single_launches": found.singles}
    if is_planned:
        copies = [n for n in compiled.instructions if any(f".{k.value}" in n for k in (Kind.OFFLOAD, Kind.PREFETCH))]
        starts = [name for name in copies if not name.rstrip("0123456789").endswith("ed")]
        remat = [name for name in compiled.instructions if name != original(name) and name not in copies]
        counts |= {"copies_found": len(starts), "recomputations_found": len(remat)}
    return counts


def _xla_limit(target: Target, module: ScheduledModule) -> int:
    return rematerializes_above(target.device, module.resident_bytes - module.constant_bytes)


def _by_jit(outcome: Outcome) -> dict[str, Any]:
    """Figures of plain `jax.jit`: compiled separately if XLA would rematerialize.

    None over several devices, where `jax.jit` has other collectives: to know them, all processes would have to compile
    once more together, and not all of them read a report.
    """
    target, unmodified = outcome.target, outcome.unmodified
    if unmodified is None or outcome.program.machine is not None:
        return {}
    same = {"jit_peak_bytes": unmodified.device_bytes, "jit_step_s": unmodified.replay.step_s}
    if not target.is_gpu or unmodified.device_bytes <= _xla_limit(target, unmodified):
        return same
    try:
        with without_messages(*_REMATERIALIZES):
            found = compile_program(outcome.program.original, target)
    except jax.errors.JaxRuntimeError:  # out of memory, or no kernel
        return {}
    made = replace(unmodified, module=read_module(found.text))
    if not _rematerialized(made.module, unmodified.module):
        return same
    return {"jit_peak_bytes": found.memory.device_bytes, "jit_step_s": made.replay.step_s}


def _rematerialized(compiled: Module, handed: Module) -> int:
    """Instructions that XLA's rematerialization added; a pass before the hook uses similar names."""
    return sum(".remat" in name for name in compiled.instructions if name not in handed.instructions)


def _huge_arrays(unmodified: ScheduledModule) -> int:
    """Arrays with more elements than cuDNN can index."""
    known = Origins(unmodified.module)
    arrays = (known.array(buffer.name) for buffer in unmodified.problem.buffers)
    return sum(array is not None and array.size >= _HUGE for array in arrays)


def _pooled(outcome: Outcome) -> dict[str, Any]:
    if not outcome.target.is_gpu:
        return {}
    found = pooled(outcome, local.pools())
    device, host = found.device, found.host
    return {
        "pool_peak_bytes": device.in_use_bytes if device and device.refused_nbytes is None else None,
        "pinned_bytes": host.pool_bytes if host.refused_nbytes is None else None,
        "pinned_regions_bytes": host.regions if host.refused_nbytes is None else (),
        "exports": found.exports,
    }


@dataclass(frozen=True)
class Pooled:
    """A step in XLA's memory pools, if they are empty before it."""

    # its pool after arguments, outputs and then the temporaries, which are one block; None if the device's memory is
    # not in a pool
    device: Taken | None
    host: Taken  # the pinned pool, after arguments and then temporaries
    exports: tuple[str, ...]  # shell commands for variables that the step needs and this process lacks


def pooled(found: Outcome, pools: local.Pools) -> Pooled:
    """Simulate a step for a GPU in the pools of a client that starts in this environment."""
    memory, nbytes = found.executable.memory, found.program.input_nbytes
    held = [nbytes[position] for position in sorted(found.program.on_host)]
    kept = [one for position, one in enumerate(nbytes) if position not in found.program.on_host]
    # The driver allocates constants outside of the pool (`GpuExecutable::ResolveConstantGlobals`).
    in_pool = memory.resident_bytes - memory.constant_bytes
    on_device = [*kept, max(0, in_pool - sum(kept)), memory.temp_bytes]
    on_host = [*held, max(0, memory.host_bytes - sum(held))]
    # For a local GPU, the known memory is the part that jax may use.
    whole, fraction = found.target.device.memory_bytes, pools.fraction if found.target.described else 1.0
    device = pools.of_device(whole, fraction).take(on_device) if pools.of_bfc else None
    host = pools.host.take(on_host)

    def exports() -> Iterator[str]:
        if host.refused_nbytes is not None:
            yield local.export(local.HOST_LIMIT, str(least_limit(on_host, 1 << 30)))
        if device is None or device.refused_nbytes is None:
            return
        if not pools.preallocates:
            yield local.export(local.PREALLOCATE, "true")
        share = math.ceil(100 * sum(on_device) * (pools.fraction / fraction) / whole) / 100  # of the whole card
        if pools.fraction < share <= 1:
            yield local.export(local.FRACTION, f"{share:.2f}")

    return Pooled(device, host, tuple(exports()))
