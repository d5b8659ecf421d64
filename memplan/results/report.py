"""Builds the report of an outcome from the compiled and the planned module."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax

from memplan import io
from memplan.compilation.outcome import Outcome, Restored
from memplan.compilation.scheduled import ScheduledModule
from memplan.hardware.machine import Machine
from memplan.hardware.roofline import dispatch_seconds
from memplan.planning.problem import Role
from memplan.planning.schedule import Kind
from memplan.program.loops.residuals import outer_loops
from memplan.program.pins import own_checkpoints
from memplan.report.mesh import CollectiveRow, Link, Mesh
from memplan.report.model import CandidateRow, LiveValue, Pinned, Report
from memplan.report.timeline import Line, Timeline
from memplan.results.decisions import decisions_of
from memplan.results.findings import counted
from memplan.results.infeasible import as_written, floor_of, unsplit
from memplan.results.memory import Origins, line, peak_lifetimes, timeline, workspace_at_peak
from memplan.results.slab_loops import slab_loops
from memplan.units import located
from memplan.xla import local
from memplan.xla.buffers import instruction_of
from memplan.xla.collectives.cost import Collective
from memplan.xla.cuda_graphs import has_own_rule, launches
from memplan.xla.host_copies import transfers
from memplan.xla.local import Taken, least_limit
from memplan.xla.module import Module
from memplan.xla.sources import constants, layer_of
from memplan.xla.target import Target
from memplan.xla.workspace import is_replaced
from memplan.xla.write import original

_MAX_UNSPLIT = 30  # operations that do not run in slabs
_HUGE = 2**31  # elements: cuDNN counts in int32


def report_of(outcome: Outcome) -> Report:
    """The report of a compiled step."""
    planned = outcome.planned
    origins = Origins(planned.base.module)
    decisions = tuple(sorted(decisions_of(outcome, origins), key=lambda decision: -decision.nbytes))
    by_buffer = {decision.name: decision.decision for decision in decisions}
    memory = timeline(planned.result, origins, by_buffer)
    return Report(
        device=outcome.target.device.name,
        runs_on=jax.devices()[0].device_kind,
        status=status_of(outcome),
        planner=outcome.plan.planner if outcome.plan is not None else "none",
        attempts=outcome.compilations,
        explorations=outcome.explorations,
        ended_by=outcome.ended_by,
        decisions=decisions,
        live_at_peak=_live_at_peak(outcome, origins, by_buffer),
        candidates=tuple(_candidates(outcome)),
        versions=versions(),
        timeline=memory,
        lines=_lines(outcome, memory),
        unsplit=unsplit(outcome.program.in_slabs, _MAX_UNSPLIT),
        as_written=as_written(outcome),
        mesh=_mesh(outcome),
        pins=tuple(_pinned(outcome)),
        checkpoints=tuple(own_checkpoints(outcome.program.traced.jaxpr)),
        peak_kernel=_peak_kernel(memory),
        **_workspace(outcome, origins),
        findings=counted(outcome),
        function=outcome.program.name,
        **_bytes(outcome),
        **_seconds(outcome),
        **_loops(outcome, origins),
        **_counts(outcome),
        **_pooled(outcome),
        **_by_jit(outcome),
    )


def _bytes(outcome: Outcome) -> dict[str, Any]:
    planned, unmodified = outcome.planned, outcome.unmodified
    backend = outcome.target.backend
    figures: dict[str, Any] = {
        "budget_bytes": outcome.limits.device_bytes,
        "host_budget_bytes": outcome.limits.host_bytes,
        "pool_share": outcome.limits.pool_share,
        "baseline_peak_bytes": unmodified.device_bytes if unmodified else None,
        "predicted_peak_bytes": planned.predicted_bytes,
        "compiled_peak_bytes": outcome.device_bytes,
        "observed_peak_bytes": None,
        "host_peak_bytes": outcome.host_bytes,
        "offloaded_bytes": planned.result.replay.copied_out_nbytes,
        "floor_bytes": floor_of(outcome)[0],
        "vector_memory_bytes": outcome.target.device.vector_memory_bytes,
        "constant_bytes": outcome.executable.memory.constant_bytes,
    }
    if backend.rematerializes:
        figures["xla_limit_bytes"] = _xla_limit(outcome.target, unmodified or planned.plain)
    if backend.indexes_in_32_bits and unmodified:
        figures["huge_arrays"] = _huge_arrays(unmodified)
    return figures


def _seconds(outcome: Outcome) -> dict[str, Any]:
    planned, unmodified = outcome.planned, outcome.unmodified
    step = planned.result.replay
    arrays = len(planned.plain.module.entry.parameters)
    is_called_by_host = outcome.target.backend.has_own_memory
    return {
        "recomputed_flops": max(0.0, step.flops - (unmodified or planned.plain).replay.flops),
        "baseline_step_s": unmodified.replay.step_s if unmodified else None,
        "predicted_step_s": step.step_s,
        "seconds_error": outcome.target.device.efficiency.error,
        "dispatch_s": dispatch_seconds(arrays) if is_called_by_host else None,
        "lower_bound_s": planned.bound_s,
        "gap_s": max(0.0, step.step_s - planned.bound_s),
        "copy_s": step.copy_s,
        "hidden_copy_s": step.hidden_copy_s,
        "stall_s": sum(end - start for start, end in step.stalls),
        "planning_s": planned.planning_s,
        "preparation_s": outcome.seconds,
    }


def _loops(outcome: Outcome, origins: Origins) -> dict[str, Any]:
    """Loops over slabs, and transfers between device and host in loops."""
    result = outcome.planned.result
    loops = [op for op in result.module.instructions.values() if op.opcode == "while"]
    by_loop = {loop.name: transfers(result.module, loop, result.device) for loop in loops}
    # The transfers of an outer loop include those of its inner loops.
    outer = [by_loop[name] for name in result.module.entry.ops if name in by_loop]
    return {
        "slab_loops": tuple(slab_loops(outcome, origins, by_loop)),
        "loop_copies": sum(copies for copies, _ in outer),
        "loop_kernels": sum(kernels for _, kernels in outer),
    }


def _lines(outcome: Outcome, memory: Timeline) -> tuple[Line, ...]:
    """The unmodified step's memory over time."""
    unmodified = outcome.unmodified
    if unmodified is None:
        return ()
    if unmodified is not outcome.planned.result:
        memory = timeline(unmodified, Origins(unmodified.module), {})
    return (line("unmodified step", memory),)


def _peak_kernel(memory: Timeline) -> str:
    """The layer or the kernel that runs at the peak, and its source line."""
    if not memory.instants:
        return ""
    peak = memory.instants[memory.peak]
    return ", ".join(filter(None, (peak.layer or peak.name, peak.source)))


def _workspace(outcome: Outcome, origins: Origins) -> dict[str, Any]:
    """Libraries' workspace at the peaks, and what algorithms with less of it take."""
    result, unmodified = outcome.planned.result, outcome.unmodified
    nbytes = workspace_at_peak(result)
    largest = max(nbytes, key=nbytes.__getitem__, default="")
    layer = layer_of(origins.scope(largest)) or original(largest)
    plain = outcome.planned.plain
    slower = [op for op in plain.module.instructions.values() if is_replaced(op)]
    return {
        "workspace_bytes": sum(nbytes.values()),
        "workspace_kernel": located(layer, origins.source(largest)) if largest else "",
        "baseline_workspace_bytes": (
            sum(workspace_at_peak(unmodified).values()) if unmodified else None
        ),
        "slower_algorithms": len(slower),
        "slower_algorithms_s": result.replay.slower_s,
    }


def _mesh(outcome: Outcome) -> Mesh | None:
    machine = outcome.program.machine
    division = outcome.program.traced.division
    if machine is None or division is None:
        return None
    replay = outcome.planned.result.replay
    groups: dict[tuple[str, tuple[str, ...]], list[tuple[Collective, int]]] = defaultdict(list)
    for collective, count in replay.collectives.items():
        groups[collective.kind, collective.axes].append((collective, count))
    rows = [
        CollectiveRow(
            kind=kind,
            over=axes,
            count=sum(count for _, count in group),
            outside_bytes=sum(round(count * op.outside_nbytes) for op, count in group),
            inside_bytes=sum(round(count * op.inside_nbytes) for op, count in group),
            seconds=sum(count * op.seconds for op, count in group),
        )
        for (kind, axes), group in groups.items()
    ]
    sizes = {name: size for mesh in division.meshes for name, size in mesh.shape.items()}
    return Mesh(
        axes=tuple(sizes.items()),
        topology=machine.topology.name,
        assumed=_assumed(machine),
        links=tuple(
            Link(axis.name, axis.size, axis.bandwidth, axis.shared)
            for axis in machine.topology.axes
        ),
        collectives=tuple(sorted(rows, key=lambda row: -row.seconds)),
        collective_s=replay.collective_s,
        hidden_s=replay.hidden_collective_s,
    )


def _assumed(machine: Machine) -> str:
    """What of a machine nobody described, and as what; "" if all of it is described."""
    return f"{machine.assumed}, as of {machine.topology.description}" if machine.assumed else ""


def status_of(outcome: Outcome | Restored) -> str:
    """The value of `Report.status`; compiles nothing, while a report may compile the plain step."""
    if not outcome.fits:
        return "does not fit"
    return "untouched" if outcome.plan is None else "fits"


def versions() -> tuple[tuple[str, str], ...]:
    """Versions of all packages that affect the figures."""
    return io.versions("memplan", "jax", "jaxlib")


def _candidates(outcome: Outcome) -> Iterator[CandidateRow]:
    plain = outcome.unmodified
    if outcome.plan is not None and plain is not None:
        verdict = (
            "fits" if outcome.limits.allow(plain.device_bytes, 0) else "over the device budget"
        )
        yield CandidateRow("plain", plain.device_bytes, 0, plain.replay.step_s, verdict)
    for candidate in outcome.rejected:
        verdict = "slower" if candidate.fits else "does not fit"
        yield CandidateRow(
            candidate.method,
            candidate.device_bytes,
            candidate.host_bytes,
            candidate.step_s,
            verdict,
        )
    verdict = "chosen" if outcome.fits else "does not fit"
    yield CandidateRow(
        outcome.method, outcome.device_bytes, outcome.host_bytes, outcome.step_s, verdict
    )


def _pinned(outcome: Outcome) -> Iterator[Pinned]:
    program = outcome.program
    buffers = outcome.planned.base.problem.buffers
    loops = [loop for loop, _ in program.loops]
    if program.pins and not loops:
        loops = outer_loops(program.original)
    for pin in program.pins:
        sizes = [buffer.nbytes for buffer in buffers if buffer.pin == pin]
        for loop in loops:
            values = [value for value, value_pin in loop.pins.items() if value_pin == pin]
            sizes += [loop.trips * loop.body.nbytes(value) for value in values]
        yield Pinned(pin.name, pin.where.value, len(sizes), sum(sizes))


def _live_at_peak(
    outcome: Outcome,
    origins: Origins,
    decisions: Mapping[str, str],
) -> tuple[LiveValue, ...]:
    """Buffers at the device's peak: temporaries, arguments, unaliased outputs, constants."""
    result = outcome.planned.result
    problem = result.problem
    aliased = {buffer.alias_set for buffer in problem.buffers if buffer.role is Role.ARGUMENT}

    def rows() -> Iterator[LiveValue]:
        for lifetime in peak_lifetimes(result):
            name = problem.buffers[lifetime.buffer].name
            yield row(name, lifetime.nbytes, origins.source(name))
        for buffer in problem.buffers:
            if buffer.role is Role.ARGUMENT:
                yield row(buffer.name, buffer.nbytes, "argument")
            elif buffer.role is Role.OUTPUT and buffer.alias_set not in aliased:
                output = row(buffer.name, buffer.nbytes, origins.source(buffer.name))
                yield replace(output, name=f"{output.name}, an output")
        for op, source in constants(outcome.planned.base.module):
            yield LiveValue(f"{op.name}, a constant", op.nbytes, op.result[0].in_numpy, source, "")

    def row(name: str, nbytes: int, source: str) -> LiveValue:
        instruction = instruction_of(name)
        planned_name = name.replace(instruction, original(instruction))
        return LiveValue(
            name=layer_of(origins.scope(name)) or name,
            nbytes=nbytes,
            shape=origins.shape(name),
            source=source,
            decision=decisions.get(name) or decisions.get(planned_name, ""),
        )

    return tuple(sorted(rows(), key=lambda row: -row.nbytes))


def _counts(outcome: Outcome) -> dict[str, int]:
    """Counts in the compiled program: rematerializations, launches, copies, recomputations."""
    backend = outcome.target.backend
    is_planned = outcome.planned.plan is not None
    if not backend.rematerializes and not backend.launches_graphs and not is_planned:
        return {}
    compiled = outcome.executable.module
    counts = {}
    if backend.rematerializes:
        counts["xla_rematerialized"] = _rematerialized(compiled, outcome.planned.result.module)
    if backend.launches_graphs:
        own_rule = has_own_rule(outcome.program.options.get("compiler_options") or {})
        launched = None if own_rule else launches(compiled, outcome.target.device)
        if launched:
            counts["cuda_graphs"] = launched.graphs
            counts["single_launches"] = launched.singles
    if is_planned:
        suffixes = [f".{kind.value}" for kind in (Kind.OFFLOAD, Kind.PREFETCH)]
        names = compiled.instructions
        copies = [name for name in names if any(suffix in name for suffix in suffixes)]
        starts = [name for name in copies if not name.rstrip("0123456789").endswith("ed")]
        recomputed = [name for name in names if name != original(name) and name not in copies]
        counts["copies_found"] = len(starts)
        counts["recomputations_found"] = len(recomputed)
    return counts


def _xla_limit(target: Target, module: ScheduledModule) -> int:
    return target.rematerializes_above(module.resident_bytes - module.constant_bytes)


def _by_jit(outcome: Outcome) -> dict[str, Any]:
    """Figures of plain `jax.jit`, which are those of the unmodified step.

    None where XLA would rematerialize it: only a whole compilation tells what that saves, as
    `memplan.compare` makes it. None over several devices, where `jax.jit` has other collectives.
    """
    target, unmodified = outcome.target, outcome.unmodified
    if unmodified is None or outcome.program.machine is not None:
        return {}
    nbytes = unmodified.device_bytes
    if target.backend.rematerializes and nbytes > _xla_limit(target, unmodified):
        return {}
    return {"jit_peak_bytes": nbytes, "jit_step_s": unmodified.replay.step_s}


def _rematerialized(compiled: Module, handed: Module) -> int:
    """Instructions that XLA's rematerialization added; another pass uses similar names."""
    return sum(
        ".remat" in name for name in compiled.instructions if name not in handed.instructions
    )


def _huge_arrays(unmodified: ScheduledModule) -> int:
    """Arrays with more elements than cuDNN can index."""
    origins = Origins(unmodified.module)
    arrays = (origins.array(buffer.name) for buffer in unmodified.problem.buffers)
    return sum(array is not None and array.size >= _HUGE for array in arrays)


def _pooled(outcome: Outcome) -> dict[str, Any]:
    if not outcome.target.backend.pools_memory:
        return {}
    pools = pooled(outcome, local.pools())
    figures: dict[str, Any] = {"exports": pools.exports}
    if pools.device and pools.device.refused_nbytes is None:
        figures["pool_peak_bytes"] = pools.device.in_use_bytes
    if pools.host.refused_nbytes is None:
        figures["pinned_bytes"] = pools.host.pool_bytes
        figures["pinned_regions_bytes"] = pools.host.regions
    return figures


@dataclass(frozen=True)
class Pooled:
    """A step in XLA's memory pools, if they are empty before it."""

    # The device's pool, if any, after arguments, outputs, and the temporaries in one block.
    device: Taken | None
    host: Taken  # the pinned pool after arguments and temporaries
    exports: tuple[str, ...]  # shell commands for missing environment variables


def pooled(outcome: Outcome, pools: local.Pools) -> Pooled:
    """Simulate a step for a GPU in the pools of a client that starts in this environment."""
    memory = outcome.executable.memory
    inputs = outcome.program.input_nbytes
    host_inputs = [inputs[position] for position in sorted(outcome.program.on_host)]
    device_inputs = [
        nbytes for position, nbytes in enumerate(inputs) if position not in outcome.program.on_host
    ]
    # The driver allocates constants outside of the pool (`GpuExecutable::ResolveConstantGlobals`).
    in_pool = memory.resident_bytes - memory.constant_bytes
    on_device = [*device_inputs, max(0, in_pool - sum(device_inputs)), memory.temp_bytes]
    on_host = [*host_inputs, max(0, memory.host_bytes - sum(host_inputs))]
    # The memory of a local GPU is the part that jax may use, of a described one all of it.
    memory_bytes = outcome.target.device.memory_bytes
    fraction = pools.fraction if outcome.target.described else 1.0
    device = pools.of_device(memory_bytes, fraction).take(on_device) if pools.of_bfc else None
    host = pools.host.take(on_host)

    def exports() -> Iterator[str]:
        if host.refused_nbytes is not None:
            yield local.export(local.HOST_LIMIT, str(least_limit(on_host, 1 << 30)))
        if device is None or device.refused_nbytes is None:
            return
        if not pools.preallocates:
            yield local.export(local.PREALLOCATE, "true")
        # Of the memory of the whole card.
        share = math.ceil(100 * sum(on_device) * (pools.fraction / fraction) / memory_bytes) / 100
        if pools.fraction < share <= 1:
            yield local.export(local.FRACTION, f"{share:.2f}")

    return Pooled(device, host, tuple(exports()))
