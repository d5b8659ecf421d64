"""The report of a planned step: figures with units in their names.

The JSON is an object with the fields below under their own names, first `"schema":
"memplan.report/1"`: tuples are arrays, `versions` is an object, unknown values are null, and NaN or
infinity never occur. Fields may be added under the same schema; none is removed, renamed or changed
in meaning.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from memplan.io import write_atomic
from memplan.report.decisions import Decision, LeftAsWritten, decisions_table, left_table
from memplan.report.diagnosis import Finding, findings_table
from memplan.report.mesh import Mesh, collectives_table
from memplan.report.result import Record, Versions
from memplan.report.slabs import SlabLoopRow, Unsplit, loops_table, unsplit_table
from memplan.report.timeline import Line, Timeline
from memplan.report.views import page, perfetto, pictures
from memplan.report.views.table import Table, largest, short_source
from memplan.units import format_bytes, format_flops, format_seconds


@dataclass(frozen=True, slots=True)
class LiveValue:
    """A buffer that is on the device when its memory peaks.

    Attributes:
      name: of the value, or else of the compiler's buffer.
      nbytes: bytes on the device.
      shape: as the compiler or jax prints it, for example `f32[64,112,112,64]`.
      source: `file:line`, or ''.
      decision: about the value; '' if there is none, as for arguments.
    """

    name: str
    nbytes: int
    shape: str
    source: str
    decision: str


@dataclass(frozen=True, slots=True)
class CandidateRow:
    """A plan, chosen or not.

    Attributes:
      name: planner and variant.
      compiled_peak_bytes: device bytes, predicted if the plan was only explored; None if
        compilation failed.
      host_bytes: the same on the host; None if the compiler does not report them.
      step_s: predicted or measured seconds of one step; None if unknown.
      verdict: chosen, or why not.
    """

    name: str
    compiled_peak_bytes: int | None
    host_bytes: int | None
    step_s: float | None
    verdict: str


@dataclass(frozen=True, slots=True)
class Pinned:
    """A name that the user pinned.

    Attributes:
      name: by `jax.ad_checkpoint.checkpoint_name`.
      where: `device`, `host` or `recompute`.
      values: number of values of that name that kernels store for the backward pass; 0 if they are
        computed inside the kernels that read them, or in slabs.
      nbytes: of these values.
    """

    name: str
    where: str
    values: int
    nbytes: int


@dataclass(frozen=True)
class Report(Record):
    """Prediction, compilation and observation of one step under one budget.

    Attributes:
      device: target of the plan.
      runs_on: the device that runs the step.
      status: `fits`, `untouched` (the unmodified step fits), or `does not fit`.
      planner: name of the planner.
      budget_bytes, host_budget_bytes: limits of the plan on the device and on the host.
      pool_share: the share of an absent device's memory that jax's pool would take there, if the
        device budget is that pool by default; None if it is not.
      baseline_peak_bytes: device bytes of the unmodified step for the same target, by XLA's rules
        for buffers; over several devices with the collectives of the planned step, which `jax.jit`
        may combine otherwise.
      jit_peak_bytes, jit_step_s: device bytes and predicted seconds of the step by plain `jax.jit`:
        of the unmodified step. None if that is not known, takes more than `xla_limit_bytes`, so
        that XLA:GPU rematerializes (`memplan.compare` compiles that), or runs on several devices.
      predicted_peak_bytes: device bytes of the plan, by the same rules, before it was compiled.
      compiled_peak_bytes: device bytes by the compiler: temporaries + arguments + outputs - aliased
        + constants.
      constant_bytes: the part of these for constants of 64 KiB and more, such as arrays that the
        step closes over.
      observed_peak_bytes: device bytes of a run; None before the first, and if the backend does not
        say.
      host_peak_bytes: host bytes at their peak.
      offloaded_bytes: bytes copied to the host in one step; as many come back.
      recomputed_flops: floating-point operations that one step repeats.
      baseline_step_s, predicted_step_s: predicted seconds of one step, unmodified and planned.
      seconds_error: the largest share by which predicted seconds were off on this device, of the
        steps that were compared with a run, or of single operations if `memplan calibrate` measured
        it; None if none was.
      dispatch_s: predicted seconds of the host to pass a step its arrays, not in the step's; None
        on a CPU.
      floor_bytes: arguments, constants, outputs and the working set of the largest kernel of the
        compiled program, which may be in slabs. No order of its kernels takes fewer bytes; a
        program in which that kernel runs in slabs may.
      lower_bound_s: seconds that no plan of the compiled program's kernels within this budget can
        beat, in any order. A program with other loops or slabs may. None if nothing was planned.
      gap_s: seconds by which the step is slower than the bound.
      attempts: number of compilations of the step.
      explorations: number of programs that were planned, but not compiled.
      ended_by: what ended planning before all programs were explored, so that another may be
        faster: `time limit` or `Ctrl-C`; '' if nothing did.
      decisions: one row per kept, offloaded, recomputed or split value, the largest first.
      live_at_peak: buffers on the device at the compiled peak, largest first; all bytes but holes
        between temporaries.
      candidates: every plan, compiled or explored.
      copy_s: predicted seconds of a step during which the busier direction of the host link is
        busy, by the compiled schedule; hidden_copy_s: the part that compute hides. None if there is
        no schedule.
      stall_s: predicted seconds of a step without compute, by the same schedule.
      copies_found, recomputations_found: planned copies to and from the host, and planned
        repetitions of kernels, in the compiled program: all of them, since memplan refuses a
        program without one. None if not counted.
      timeline: memory and work over the chosen step; its peak is `predicted_peak_bytes`.
      lines: device memory over time of the unmodified step.
      planning_s: seconds of planning; preparation_s: seconds until the step can run, compilation
        included.
      xla_limit_bytes: device bytes above which XLA:GPU rematerializes by itself if jax compiles a
        step; None on CPU.
      xla_rematerialized: instructions that XLA added to the plan by rematerialization, which
        memplan disables: none.
      slab_loops: loops over slabs; empty if there are none.
      loop_copies, loop_kernels: transfers between device and host in a trip of the step's loops, by
        memcpy and by kernels of XLA; kernels delay compute.
      unsplit: the largest operations between slab loops that cannot run in slabs.
      as_written: values that parts of the step keep for their gradients, and that are not planned.
      cuda_graphs, single_launches: CUDA graphs that a step launches, and kernels, library calls and
        copies outside of them; copies to and from the host, like cuDNN's convolutions, end a graph.
        None on a CPU, and if the compiled text does not say, as with collectives, conditionals or
        scans, or if flags of the user change XLA's rule.
      huge_arrays: arrays of the unmodified step with 2^31 elements or more, which cuDNN does not
        accept; None on a CPU, and if unknown.
      vector_memory_bytes: of a TPU's cores, where XLA keeps some values instead of on the device.
        memplan predicts which, so that the predicted bytes may be off by as many. None on other
        devices.
      pool_peak_bytes: device bytes that XLA's pool counts for the step alone (`peak_bytes_in_use`).
        A block includes the rest of its chunk if that is smaller than the request and than 128 MiB.
        None if there is no such pool, or it is too small.
      pinned_bytes: host bytes of XLA's pinned pool; None as above. pinned_regions_bytes: of each of
        its regions, in the order in which XLA pins them.
      exports: shell commands for the variables that XLA's pools need for the step.
      mesh: devices, links and collectives of a step on several devices; None on one.
      pins: names that the user pinned.
      checkpoints: `file:line` of the step's own differentiated `jax.checkpoint`s, which memplan
        keeps.
      workspace_bytes: bytes at the compiled peak that are the workspace of a library, such as
        cuDNN; workspace_kernel: the kernel that needs most of them: its layer or name, and
        `file:line`, or ''. baseline_workspace_bytes: at the unmodified step's peak.
      slower_algorithms: convolutions that run by another algorithm of cuDNN than the fastest, to
        need less workspace; slower_algorithms_s: seconds by which a step is slower for it, as XLA's
        autotuner timed them.
      peak_kernel: the kernel at the peak: its layer or name, and `file:line`; '' if unknown.
      step: the step's name on the command line: `MODULE:FACTORY(size=64)`; '' for a step of a
        program.
      function: name of the function that was planned; '' if unknown.
      findings: changes that could save memory, counted without another compilation;
        `memplan.api.doctor` finds more.
      versions: (name, version) of python, jax, jaxlib and all other software that affects the
        figures.
    """

    SCHEMA: ClassVar[str] = "memplan.report/1"

    device: str
    runs_on: str
    status: str
    planner: str
    budget_bytes: int
    host_budget_bytes: int
    baseline_peak_bytes: int | None
    predicted_peak_bytes: int
    compiled_peak_bytes: int | None
    observed_peak_bytes: int | None
    host_peak_bytes: int
    offloaded_bytes: int
    recomputed_flops: float
    baseline_step_s: float | None
    predicted_step_s: float | None
    floor_bytes: int | None
    lower_bound_s: float | None
    attempts: int = 1
    decisions: tuple[Decision, ...] = ()
    live_at_peak: tuple[LiveValue, ...] = ()
    candidates: tuple[CandidateRow, ...] = ()
    versions: Versions = ()
    gap_s: float | None = None
    copy_s: float | None = None
    hidden_copy_s: float | None = None
    stall_s: float | None = None
    copies_found: int | None = None
    recomputations_found: int | None = None
    timeline: Timeline | None = None
    lines: tuple[Line, ...] = ()
    planning_s: float = 0.0
    preparation_s: float | None = None
    xla_limit_bytes: int | None = None
    xla_rematerialized: int = 0
    jit_peak_bytes: int | None = None
    jit_step_s: float | None = None
    slab_loops: tuple[SlabLoopRow, ...] = ()
    loop_copies: int = 0
    loop_kernels: int = 0
    unsplit: tuple[Unsplit, ...] = ()
    as_written: tuple[LeftAsWritten, ...] = ()
    huge_arrays: int | None = None
    pool_peak_bytes: int | None = None
    pinned_bytes: int | None = None
    pinned_regions_bytes: tuple[int, ...] = ()
    exports: tuple[str, ...] = ()
    cuda_graphs: int | None = None
    single_launches: int | None = None
    constant_bytes: int = 0
    mesh: Mesh | None = None
    pins: tuple[Pinned, ...] = ()
    checkpoints: tuple[str, ...] = ()
    peak_kernel: str = ""
    step: str = ""
    seconds_error: float | None = None
    dispatch_s: float | None = None
    explorations: int = 0
    findings: tuple[Finding, ...] = ()
    function: str = ""
    pool_share: float | None = None
    ended_by: str = ""
    vector_memory_bytes: int | None = None
    workspace_bytes: int = 0
    workspace_kernel: str = ""
    baseline_workspace_bytes: int | None = None
    slower_algorithms: int = 0
    slower_algorithms_s: float = 0.0

    @property
    def title(self) -> str:
        return self.step or self.function or "step"

    @property
    def subtitle(self) -> str:
        where = f"each {self.device} of mesh {self.mesh.sizes}" if self.mesh else self.device
        return f"budget {format_bytes(self.budget_bytes)} on {where}"

    def tables(self, rows: int) -> tuple[Table, ...]:
        """All tables; at most `rows` rows of long ones."""
        tables = *self._first_tables(rows), _live(self, rows), decisions_table(self.decisions, rows)
        return tuple(table for table in tables if table.rows)

    def _first_tables(self, rows: int) -> tuple[Table, ...]:
        """The tables that the page shows, too."""
        collectives = collectives_table(self.mesh.collectives if self.mesh else ())
        slabs = loops_table(self.slab_loops), unsplit_table(self.unsplit, rows)
        as_written = left_table(self.as_written)
        findings = findings_table(self.findings, self.budget_bytes)
        return *findings, _summary(self), _candidates(self), collectives, as_written, *slabs

    def to_html(self) -> str:
        """A self-contained page: memory over the step, decisions, tables, the JSON."""
        tables = self._first_tables(page.FALLBACK_ROWS)
        fallbacks = (
            _live(self, page.FALLBACK_ROWS),
            decisions_table(self.decisions, page.FALLBACK_ROWS),
        )
        header = page.Header(self.title, self.subtitle, self.status, self.status == "fits")
        entries = self.entries()
        del entries["live_at_peak"]  # the timeline has it
        return page.of_report(header, entries, tables, fallbacks)

    def _repr_html_(self) -> str:
        return page.frame(self.to_html(), self.title)

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write a trace for ui.perfetto.dev: memory as counters, kernels and copies as slices.

        Raises:
          ImportError: perfetto, the extra `trace`, is not installed.
          ValueError: there is no timeline.
          OSError: the file cannot be written; nothing is left behind.
        """
        timeline = self._required_timeline()
        trace = perfetto.trace(
            f"{self.title}, {self.subtitle}", timeline, self.lines, self.budget_bytes
        )
        write_atomic(path, trace)

    def save_png(self, path: str | os.PathLike[str]) -> None:
        """Draw memory over the step, with the streams below.

        Raises:
          ImportError: matplotlib, the extra `plots`, is not installed.
          ValueError: there is no timeline.
          OSError: the file cannot be written; nothing is left behind.
        """
        limits = (("budget", self.budget_bytes), ("floor", self.floor_bytes))
        timeline = self._required_timeline()
        title = f"memplan: {self.device}"
        picture = pictures.png_of_memory(title, timeline, self.lines, limits)
        write_atomic(path, picture)

    def _required_timeline(self) -> Timeline:
        if self.timeline is None or not self.timeline.instants:
            raise ValueError(
                f"this report has no timeline: the compiler gives no schedule for {self.device}, "
                "and the step was not planned. Plan it for a GPU (device=...), or with a budget "
                "that the unmodified step does not fit."
            )
        return self.timeline


def _summary(report: Report) -> Table:
    versions = ", ".join(f"{name} {version}" for name, version in report.versions)
    rows = (*_plan_rows(report), *_byte_rows(report), *_step_rows(report), ("versions", versions))
    return Table("memplan", ("", ""), rows)


def _plan_rows(report: Report) -> Iterator[tuple[str, str]]:
    runs_on = f", runs on {report.runs_on}" if report.runs_on != report.device else ""
    times = "once" if report.attempts == 1 else f"{report.attempts} times"
    explored = f", {report.explorations} explored" if report.explorations else ""
    yield "status", report.status
    if report.step:
        yield "step", report.step
    yield "planned for", f"{report.device}{runs_on}"
    if report.mesh:
        yield from report.mesh.summary
    yield "planner", f"{report.planner}{_slabs(report)}, compiled {times}{explored}"
    if report.ended_by:
        yield "planning ended by", f"{report.ended_by}; another program may be faster"


def _byte_rows(report: Report) -> Iterator[tuple[str, str]]:
    observed = "not observed"
    if report.observed_peak_bytes is not None:
        observed = format_bytes(report.observed_peak_bytes)
    compiled = f"{format_bytes(report.compiled_peak_bytes)} compiled"
    predicted = f"{format_bytes(report.predicted_peak_bytes)} predicted"
    yield "device budget", f"{format_bytes(report.budget_bytes)}{of_pool(report.pool_share)}"
    yield "device peak", f"{compiled}, {predicted}, {observed}"
    if report.vector_memory_bytes is not None:
        kept = format_bytes(report.vector_memory_bytes)
        yield "  on a TPU", f"its cores hold up to {kept} besides; no plan has run on one"
    if report.pool_peak_bytes is not None:
        yield "  in XLA's pool", format_bytes(report.pool_peak_bytes)
    if report.peak_kernel:
        yield "  while it runs", report.peak_kernel
    if report.workspace_bytes:
        of_kernel = f" of {report.workspace_kernel}" if report.workspace_kernel else ""
        yield "  a library's workspace", f"{format_bytes(report.workspace_bytes)}{of_kernel}"
    if report.constant_bytes:
        yield "  constants", format_bytes(report.constant_bytes)
    yield "  its largest kernel", format_bytes(report.floor_bytes)
    unmodified = f"{format_bytes(report.baseline_peak_bytes)}{_workspace(report)}"
    yield "  unmodified step", f"{unmodified}{_beyond_cudnn(report)}"
    if _xla_rematerializes(report):
        yield "  by jax.jit", "less, as XLA rematerializes: `memplan compare` tells"
    host_budget = format_bytes(report.host_budget_bytes)
    yield "host peak", f"{format_bytes(report.host_peak_bytes)} of {host_budget}"
    if report.pinned_bytes:
        yield "  in XLA's pinned pool", _pinned_pool(report)
    yield from (("runs only after", line) for line in report.exports)


def _step_rows(report: Report) -> Iterator[tuple[str, str]]:
    yield "offloaded in a step", format_bytes(report.offloaded_bytes)
    yield "recomputed in a step", format_flops(report.recomputed_flops)
    yield from (("pinned", _pinned(pin)) for pin in report.pins)
    if report.checkpoints:
        yield "jax.checkpoint", f"as written: {', '.join(report.checkpoints)}"
    yield "found compiled", _compiled_counts(report)
    yield from _launches(report)
    yield "step, predicted", f"{format_seconds(report.predicted_step_s)}{_certainty(report)}"
    yield "  unmodified step", format_seconds(report.baseline_step_s)
    if report.slower_algorithms:
        yield "  for less workspace", _slower(report)
    if report.dispatch_s is not None:
        yield "  besides, on the host", f"{format_seconds(report.dispatch_s)} to pass it its arrays"
    yield "  copies", _copies(report)
    yield "  bound of its kernels", f"{format_seconds(report.lower_bound_s)}{_below_plan(report)}"
    planning = format_seconds(report.planning_s)
    yield "prepared in", f"{format_seconds(report.preparation_s)}, {planning} of it planning"


def _slower(report: Report) -> str:
    count = report.slower_algorithms
    convolutions = f"{count} convolution{'s' * (count > 1)} by slower algorithms"
    return f"{format_seconds(report.slower_algorithms_s)} of it, as {convolutions}"


def of_pool(share: float | None) -> str:
    """` (75% of the device, jax's pool)`, for a budget that is jax's pool by default."""
    return f" ({share:.0%} of the device, jax's pool)" if share is not None else ""


def _pinned_pool(report: Report) -> str:
    count = len(report.pinned_regions_bytes)
    sizes = ", ".join(map(format_bytes, report.pinned_regions_bytes))
    regions = f", in {count} region{'s' * (count > 1)}: {sizes}" if count else ""
    return f"{format_bytes(report.pinned_bytes)}{regions}"


def _pinned(pin: Pinned) -> str:
    if not pin.values:
        return f"{pin.name}: {pin.where}; no kernel stores it for the backward pass"
    values = f"{pin.values} value{'s' * (pin.values > 1)}"
    return f"{pin.name}: {pin.where}, {values}, {format_bytes(pin.nbytes)}"


def _slabs(report: Report) -> str:
    count = len(report.slab_loops)
    return f", {count} loop{'s' * (count > 1)} over slabs" if count else ""


def _workspace(report: Report) -> str:
    nbytes = report.baseline_workspace_bytes
    return f", {format_bytes(nbytes)} of it workspace" if nbytes else ""


def _beyond_cudnn(report: Report) -> str:
    if not report.huge_arrays:
        return ""
    arrays = (
        "1 array of it has"
        if report.huge_arrays == 1
        else f"{report.huge_arrays} arrays of it have"
    )
    return f"; {arrays} 2^31 elements or more, which cuDNN does not take"


def _xla_rematerializes(report: Report) -> bool:
    """Does `jax.jit` compile another program than the unmodified step?"""
    limit, nbytes = report.xla_limit_bytes, report.baseline_peak_bytes
    return limit is not None and nbytes is not None and nbytes > limit


def _copies(report: Report) -> str:
    if not report.copy_s:
        return "none" if report.copy_s is not None else "not known"
    hidden = (report.hidden_copy_s or 0.0) / report.copy_s
    transfers = report.loop_copies + report.loop_kernels
    kernels = f"; {report.loop_kernels} of {transfers} transfers in loops are kernels, not memcpy"
    stalled = f"{format_seconds(report.stall_s)} stalled{kernels if report.loop_kernels else ''}"
    return f"{format_seconds(report.copy_s)}, {hidden:.0%} under computation; {stalled}"


def _compiled_counts(report: Report) -> str:
    if report.copies_found is None:
        return "not looked for"
    return f"{report.copies_found} copies, {report.recomputations_found} kernels run again"


def _launches(report: Report) -> tuple[tuple[str, str], ...]:
    if report.cuda_graphs is None:
        return ()
    graphs = f"{report.cuda_graphs} CUDA graph{'s' * (report.cuda_graphs != 1)}"
    launches = f"{graphs}, {report.single_launches} kernels and copies outside of them"
    return (("launched in a step", launches),)


def _certainty(report: Report) -> str:
    """`, within 15% where it was compared with a run`."""
    if report.seconds_error is None:
        return ", never compared with a run on this device"
    return f", within {report.seconds_error:.0%} where it was compared with a run"


def _below_plan(report: Report) -> str:
    """`, 3.1% below the plan`."""
    if not report.lower_bound_s or not report.predicted_step_s:
        return ""
    return f", {1 - report.lower_bound_s / report.predicted_step_s:.1%} below the plan"


def _candidates(report: Report) -> Table:
    rows = tuple(
        (
            candidate.name,
            format_bytes(candidate.compiled_peak_bytes),
            format_bytes(candidate.host_bytes),
            format_seconds(candidate.step_s),
            candidate.verdict,
        )
        for candidate in report.candidates
    )
    return Table("Compiled plans", ("plan", ">device peak", ">host", ">step", "verdict"), rows)


def _live(report: Report, limit: int) -> Table:
    values = sorted(report.live_at_peak, key=lambda value: -value.nbytes)[:limit]
    rows = tuple(
        (
            format_bytes(value.nbytes),
            value.decision,
            value.shape,
            short_source(value.source),
            value.name,
        )
        for value in values
    )
    title = largest("On the device at the peak", len(rows), len(report.live_at_peak))
    return Table(title, (">bytes", "decision", "shape", "source", "value"), rows)
