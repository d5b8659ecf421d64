"""Measures one row in this process: `python -m experiments.gpu.measure ROW FOLDER`.

ROW is JSON. Prints `pairs`, which are measured and predicted figures, and `facts`, which have no
prediction. Both are printed again after every part, so a process that is killed loses only its last
part.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import functools
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

import memplan
from experiments.compiled import device_bytes
from experiments.gpu import kernels as kernel_times
from experiments.gpu.card import this_card
from experiments.gpu.operations import GROUPS, placed
from experiments.gpu.rows import MODELS, Row
from experiments.gpu.trace import Event, copies, kernels, length, overlap, traced
from memplan import pipeline
from memplan.hardware import measured
from memplan.hardware.efficiency import PEAK
from memplan.hardware.measured import MeasuredDevice
from memplan.program import compat
from memplan.report.model import Report
from memplan.request import Request
from memplan.results.execute import numbers_gate
from memplan.results.report import report_of
from memplan.stages import Compiled, Planned
from memplan.studies.baselines import policies
from memplan.studies.calibrate import calibrate, rates_of
from memplan.verify.numbers import relative_error
from memplan.xla.local import local_device, room
from memplan.xla.module import Module
from memplan.xla.replay import Replay, replay

Run = Callable[..., Any]
Steps = Sequence[Sequence[np.ndarray]]
"""The leaves that each step of a run returns."""

RATES = "rates.json"  # File with the measured rates of the card, next to the rows.
_OPTIONS: Mapping[str, Any] = {"donate_argnums": 0}
_STEPS = 2  # Steps before numbers are compared: the second reads what the first wrote.
_AUTOTUNED = "EXPERIMENTS_GPU_AUTOTUNED_BYTES"  # Set in a process that was restarted.
_PLAN = "EXPERIMENTS_GPU_PLAN"  # File of a saved plan to follow.


@contextlib.contextmanager
def card_alone() -> Iterator[None]:
    """Exclusive use of the card, for our timing and XLA's autotuning; rows prepare in parallel."""
    with Path(tempfile.gettempdir(), f"experiments-gpu-card-{os.getuid()}").open("w") as place:
        fcntl.flock(place, fcntl.LOCK_EX)
        yield


@dataclass
class Figures:
    """Figures by name; a name ends in its unit: `_s`, `bytes`, `bytes/s`, `FLOP/s`, or none."""

    pairs: dict[str, tuple[float, float | None]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def tell(self) -> None:
        print(json.dumps({**asdict(self), "card": this_card()}), flush=True)


@dataclass(frozen=True)
class Start:
    """A step and its first arguments as host arrays, so that the card's memory stays free."""

    step: Run
    state: Any
    batch: Any

    @staticmethod
    def of(model: str, seed: int = 0) -> Start:
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            step, (state, batch) = MODELS[model](concrete=True, seed=seed)
            return Start(step, *jax.device_get((state, batch)))

    @property
    def shapes(self) -> Any:
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (self.state, self.batch)
        )

    def placed(self, plan: Planned | None = None) -> tuple[Any, Any]:
        state = plan.place(self.state) if plan else jax.device_put(self.state)
        return jax.block_until_ready((state, jax.device_put(self.batch)))

    @functools.cached_property
    def plain(self) -> Any:
        lowered = jax.jit(self.step, **_OPTIONS).lower(*self.shapes)
        with card_alone():
            return lowered.compile()

    def checkpointed(self, policy: Any) -> Any:
        checkpoint = functools.partial(jax.checkpoint, policy=policy)
        with compat.differentiated_as(checkpoint):  # a new function: jax caches traces by function
            lowered = jax.jit(lambda *args: self.step(*args), **_OPTIONS).lower(*self.shapes)
        with card_alone():
            return lowered.compile()

    def planned(self, row: Row, budget: Any = None, **options: Any) -> Planned:
        budget = budget or (int(row.share * device_bytes(self.plain)) if row.share else row.budget)
        on_host = 0 if row.host_state else ()
        try:
            return memplan.jit(
                self.step, budget=budget, host_state=on_host, **_OPTIONS, **options
            ).plan(*self.shapes)
        except memplan.InfeasibleBudgetError as error:
            if not row.smallest:
                raise
            return self.planned(replace(row, smallest=False), error.smallest_bytes, **options)


def rates(row: Row, folder: Path, figures: Figures) -> None:
    """The card's measured rates and those of its data sheet."""
    with card_alone():
        card, assumed = calibrate(quick=not this_card()["real"]), rates_of(local_device())
    card.save(folder / RATES)
    for name, value in rates_of(card.device).items():
        figures.pairs[name.replace(", ", "_")] = value, assumed[name]


def planned(row: Row, folder: Path, figures: Figures) -> None:
    """A planned step: bytes, seconds, copies; then the plain step, and the numbers of both."""
    start = Start.of(row.model)
    plan = start.planned(row)
    run, report = plan.compile(), plan.report
    assert report.compiled_peak_bytes is not None
    figures.facts |= {
        "status": report.status, "planner": report.planner, "budget_bytes": report.budget_bytes,
        "loops over slabs": len(report.slab_loops), "copies planned": report.copies_found,
        "kernels again": report.recomputations_found, "prepared_s": report.preparation_s,
        "exports": list(report.exports), "host_bytes": report.host_peak_bytes,
    }  # fmt: skip
    figures.pairs["compiled_bytes"] = report.compiled_peak_bytes, report.predicted_peak_bytes
    figures.tell()
    _restart_if_autotuning_took_more(report.compiled_peak_bytes, figures)
    if row.plain:
        start.plain  # noqa: B018  # compiled before the card is taken
    with card_alone():
        free = _host_bytes_free()
        times = _timed(run, *start.placed(plan))
        step_s = _median(times)
        figures.facts |= {"first_step_s": times[0], "second_step_s": times[1], "steps": len(times)}
        figures.pairs["step_s"] = step_s, report.predicted_step_s
        figures.pairs["host memory_bytes"] = (
            free - _host_bytes_free(),
            report.pinned_bytes or report.host_peak_bytes,
        )
        if memory := room():
            figures.pairs["peak of the pool_bytes"] = memory.peak_bytes, report.pool_peak_bytes
        if observed := plan.report.observed_peak_bytes:
            figures.pairs["peak of the step_bytes"] = observed, report.compiled_peak_bytes
        figures.tell()
        events = traced(run, *start.placed(plan))
        if row.plain:
            _beside_plain(row, start, plan, step_s, figures)
            figures.tell()
    _look_inside(events, _module(run), report, step_s, folder, figures)


def checkpoint(row: Row, folder: Path, figures: Figures) -> None:
    """Policies of `jax.checkpoint`, and memplan within the same bytes."""
    start = Start.of(row.model)
    for name, policy in itertools.islice(policies().items(), 2):
        compiled = start.checkpointed(policy)
        nbytes, predicted_s = (
            device_bytes(compiled),
            replay(_module(compiled), local_device()).step_s,
        )
        plan = start.planned(row, nbytes)
        run = plan.compile()
        with card_alone():
            policy_s = _median(_timed(compiled, *start.placed()))
            planned_s = _median(_timed(run, *start.placed(plan)))
        figures.facts |= {f"{name}_bytes": nbytes, f"memplan within what {name} takes_s": planned_s}
        figures.pairs[f"{name}_s"] = policy_s, predicted_s
        ratio = _over(predicted_s, plan.report.predicted_step_s)
        figures.pairs[f"{name}: its time over memplan's"] = policy_s / planned_s, ratio
        figures.tell()


def clocks(row: Row, folder: Path, figures: Figures) -> None:
    """A plan by a roofline and one by the class of a kernel, both timed."""
    start, card, first = Start.of(row.model), local_device(), jax.devices()[0]
    for name, efficiency in {"roofline": PEAK, "classes": card.efficiency}.items():
        path = folder / "clocks" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        device = replace(card, efficiency=efficiency)
        MeasuredDevice(device, first.platform, first.device_kind).save(path)
        plan = start.planned(row, device=str(path))
        run = plan.compile()
        with card_alone():
            step_s = _median(_timed(run, *start.placed(plan)))
        figures.pairs[f"planned by {name}_s"] = step_s, plan.report.predicted_step_s
        figures.facts[f"planned by {name}: copies"] = plan.report.copies_found
        figures.facts[f"planned by {name}: kernels again"] = plan.report.recomputations_found
        figures.tell()


def gate(row: Row, folder: Path, figures: Figures) -> None:
    """The numbers of a rewritten step, judged by the error that recompilation alone introduces."""
    start = Start.of(row.model)
    args = jax.device_put((start.state, start.batch))
    outcome = pipeline.best(
        start.step, args, {}, _OPTIONS, Request(int(row.share * device_bytes(start.plain)))
    )
    with card_alone():
        verdict = numbers_gate(outcome, args, {})
    figures.facts |= {
        "seeds": [0],
        "way": outcome.method,
        "passes": verdict.passes,
        "gate": str(verdict),
    }


def attempt(row: Row, folder: Path, figures: Figures) -> None:
    """Run two steps, with a saved plan if there is one; report which part fails, and how."""
    start, at = Start.of(row.model), "planning"
    saved = memplan.Plan.load(os.environ[_PLAN]) if _PLAN in os.environ else None
    try:
        plan = start.planned(row, plan=saved)
        report = plan.report
        figures.facts |= {
            "compiled_bytes": report.compiled_peak_bytes,
            "host_bytes": report.host_peak_bytes,
        }
        if saved:
            figures.facts["same module"] = (
                plan.plan is not None and plan.plan.fingerprint == saved.fingerprint
            )
        at = "running"
        with card_alone():
            _timed(plan.compile(), *start.placed(plan), minimum=2, enough_s=0)
    except (memplan.MemplanError, jax.errors.JaxRuntimeError) as error:
        figures.facts["refused"] = f"{type(error).__name__} while {at}: {str(error)[:1000]}"
    else:
        figures.facts["refused"] = "no: it ran"


def restart(row: Row, folder: Path, figures: Figures) -> None:
    """Kernels autotuned here and for a described card; and a saved plan in the next process."""
    start = Start.of(row.model)
    plan = start.planned(row)
    figures.facts["compiled_bytes"] = plan.report.compiled_peak_bytes
    request = Request(plan.report.budget_bytes, device=local_device().name)
    try:
        described = pipeline.best(start.step, start.shapes, {}, _OPTIONS, request)
    except (memplan.MemplanError, jax.errors.JaxRuntimeError) as error:  # maybe no assembler for it
        figures.facts["described"] = f"{type(error).__name__}: {str(error)[:500]}"
    else:
        plain_bytes = report_of(described).baseline_peak_bytes
        figures.pairs["plain step, here and described_bytes"] = (
            device_bytes(start.plain),
            plain_bytes,
        )
        ours, theirs = (
            _largest_workspace(module)
            for module in (_module(plan.compile()), described.executable.module)
        )
        figures.pairs["largest workspace, here and described_bytes"] = ours, theirs
    with tempfile.TemporaryDirectory() as place:
        assert plan.plan is not None, "the step fits as it is"
        plan.plan.save(path := f"{place}/plan.json")
        command = [
            *sys.orig_argv[:-2],
            json.dumps(asdict(replace(row, measure="attempt"))),
            str(folder),
        ]
        later = subprocess.run(
            command, env={**os.environ, _PLAN: path}, capture_output=True, text=True, check=False
        )
    printed = (
        later.stderr[-1000:]
        if later.returncode
        else json.loads(later.stdout.splitlines()[-1])["facts"]
    )
    figures.facts["the next start, by the saved plan"] = printed


def operations(row: Row, folder: Path, figures: Figures) -> None:
    """The kernels of groups of operations."""
    for name, group in GROUPS.items():
        if not name.startswith(tuple(row.groups)):
            continue
        try:
            with card_alone():
                function, args = placed(group)
                compiled = jax.jit(function).lower(*args).compile()
                run = functools.partial(compiled, *args)
                result = kernel_times.record(f"{row.name} {name}", compiled, run, folder)
        except (jax.errors.JaxRuntimeError, ValueError, TypeError) as error:
            figures.facts[name] = f"fails: {str(error)[:300]}"
            continue
        known_s = sum(seconds for op, (seconds, *_) in result["seconds"].items() if op)
        figures.facts |= {
            f"{name}, clock_s": result["clock_s"], f"{name}, kernels_s": result["busy_s"],
            f"{name}, known by instruction_s": known_s, f"{name}, launches": result["launches"],
        }  # fmt: skip
        figures.tell()


def step_kernels(row: Row, folder: Path, figures: Figures) -> None:
    """The kernels of a plain step, or of a planned one if the row has a budget."""
    start = Start.of(row.model)
    plan = start.planned(row) if row.share or row.budget else None
    compiled = plan.compile() if plan else start.plain
    with card_alone():
        current = [start.placed(plan)]

        def run() -> Any:  # the state is donated: the next step begins with what this one returns
            state, metrics = compiled(*current[0])
            current[0] = state, current[0][1]
            return metrics

        result = kernel_times.record(
            row.name, compiled._runner.executable.compiled if plan else compiled, run, folder
        )
    known_s = sum(seconds for op, (seconds, *_) in result["seconds"].items() if op)
    predicted = replay(_module(compiled), local_device())
    figures.pairs["step_s"] = result["clock_s"], predicted.step_s
    figures.pairs["kernels_s"] = result["busy_s"], predicted.compute_s
    figures.facts |= {"known by instruction_s": known_s, "launches": result["launches"]}


def link(row: Row, folder: Path, figures: Figures) -> None:
    """The link's speed by size of copies, and next to kernels."""
    with card_alone():
        result = kernel_times.link()
    (folder / kernel_times.FOLDER).mkdir(parents=True, exist_ok=True)
    memplan.io.write_atomic(folder / kernel_times.FOLDER / "link.json", json.dumps(result) + "\n")
    figures.facts["alone"] = result["alone"]


MEASURES: Mapping[str, Callable[[Row, Path, Figures], None]] = {
    "card": lambda row, folder, figures: None,
    **{
        function.__name__: function
        for function in (rates, planned, checkpoint, clocks, gate, attempt, restart)
    },
    **{function.__name__: function for function in (operations, step_kernels, link)},
}


def _restart_if_autotuning_took_more(compiled_bytes: int, figures: Figures) -> None:
    """Restart the process if autotuning took more memory than the step will.

    A backend never resets its peak. The second process does not autotune again: XLA has a cache.
    """
    peak = memory.peak_bytes if (memory := room()) else None
    if peak and peak >= compiled_bytes and _AUTOTUNED not in os.environ:
        os.execve(sys.executable, sys.orig_argv, {**os.environ, _AUTOTUNED: str(peak)})
    figures.facts |= {
        "peak before the first step_bytes": peak,
        "autotuning_bytes": int(os.environ.get(_AUTOTUNED, 0)),
    }


def _timed(
    run: Run, state: Any, batch: Any, minimum: int = 6, enough_s: float = 6.0
) -> list[float]:
    """Seconds of each step, up to 30 steps; fewer than six if they exceed half a minute."""
    seconds: list[float] = []
    while (len(seconds) < minimum and sum(seconds) < 5 * enough_s) or (
        len(seconds) < 30 and sum(seconds) < enough_s
    ):
        began = time.perf_counter()
        state, _ = jax.block_until_ready(run(state, batch))
        seconds.append(time.perf_counter() - began)
    return seconds


def _module(compiled: Any) -> Module:
    """The scheduled module of what jax or memplan compiled."""
    of_jax = compiled._runner.executable.compiled if isinstance(compiled, Compiled) else compiled
    return Module.read(compat.module_of(of_jax))


def _median(seconds: Sequence[float]) -> float:
    """Median of all steps but the first, which pins memory and loads kernels."""
    return statistics.median(seconds[1:])


def _look_inside(
    events: Sequence[Event],
    module: Module,
    report: Report,
    step_s: float,
    folder: Path,
    figures: Figures,
) -> None:
    """Copies, their rates and overlap, and kernels by kind, in the trace and in the replay."""
    device = local_device()
    result = replay(module, device)
    if (folder / RATES).exists() and device.target is not None:
        again = replay(module, measured.load(folder / RATES).device)
        figures.pairs["step by the card's own rates_s"] = step_s, again.step_s
    if not events:
        figures.facts["trace"] = "the profiler saw no GPU"
        return
    busy = [event.span for event in kernels(events)]
    figures.pairs["kernels_s"] = length(busy), result.compute_s
    for direction, label in (("D2H", "to the host"), ("H2D", "to the device")):
        moved = copies(events, direction)
        spans, nbytes = [event.span for event in moved], sum(event.nbytes for event in moved)
        figures.facts[f"memcpys {label}"] = len(moved)
        if moved:
            rate, hidden = nbytes / length(spans), overlap(spans, busy) / length(spans)
            predicted = _over(report.hidden_copy_s, report.copy_s)
            figures.pairs[f"memcpys {label}_bytes"] = nbytes, report.offloaded_bytes
            figures.pairs[f"memcpys {label}_bytes/s"] = rate, device.link.bandwidth
            figures.pairs[f"memcpys {label}, share under kernels"] = hidden, predicted
    _kernels_by_kind(events, module, result, figures)


def _kernels_by_kind(
    events: Sequence[Event], module: Module, result: Replay, figures: Figures
) -> None:
    """Seconds of the kernels outside loops whose instruction the profiler knows, by kind."""
    entry, spent = module.entry.ops, defaultdict[str, float](float)
    for event in kernels(events):
        spent[event.op] += event.span[1] - event.span[0]
    by_op = {
        name: seconds for name, seconds in spent.items() if name in entry and name in result.seconds
    }
    kinds = {name: entry[name].target or entry[name].opcode for name in by_op}
    for kind in sorted(set(kinds.values())):
        names = [name for name in by_op if kinds[name] == kind]
        sums = (sum(seconds[name] for name in names) for seconds in (by_op, result.seconds))
        figures.pairs[f"{len(names)} x {kind}_s"] = next(sums), next(sums)
    share = _over(sum(by_op.values()), sum(spent.values()))
    figures.facts["share of the kernels' time that is known by instruction"] = share
    for name in sorted(by_op, key=lambda name: -abs(by_op[name] - result.seconds[name]))[:5]:
        figures.pairs[f"far off: {kinds[name]} {name}_s"] = by_op[name], result.seconds[name]


def _beside_plain(row: Row, start: Start, plan: Planned, step_s: float, figures: Figures) -> None:
    """Compare the numbers after two steps bit by bit; measure the plain step's bytes and time."""
    report = plan.report
    starts = [start, *(Start.of(row.model, seed) for seed in range(1, row.seeds))]
    ours, ours_again = (
        [_after(plan.compile(), *seeded.placed(plan)) for seeded in starts] for _ in range(2)
    )
    try:
        theirs, again = (
            [_after(start.plain, *seeded.placed()) for seeded in starts] for _ in range(2)
        )
        plain_s = _median(_timed(start.plain, *start.placed()))
        events = traced(start.plain, *start.placed())
    except jax.errors.JaxRuntimeError as error:
        figures.facts["the plain step"] = f"fails: {str(error)[:300]}"
        return
    chosen = (_module(run).chosen_kernels for run in (start.plain, plan.compile()))
    figures.facts["kernels that XLA chose otherwise than in the plain step"] = _unlike(*chosen)
    figures.facts |= {"seeds": list(range(row.seeds)), "leaves": sum(len(run[-1]) for run in ours)}
    for name, references, candidates in (
        ("planned", theirs, ours),
        ("plain once more", theirs, again),
        ("planned once more", ours, ours_again),
    ):
        _compare(name, references, candidates, figures)
    figures.pairs["plain_step_s"] = plain_s, report.baseline_step_s
    figures.facts["plain step's kernels_s"] = length([event.span for event in kernels(events)])
    predicted = _over(report.predicted_step_s, report.baseline_step_s)
    figures.pairs["step over plain"] = step_s / plain_s, predicted
    if memory := room():
        figures.pairs["plain_peak_bytes"] = memory.peak_bytes, device_bytes(start.plain)
    if report.copy_s:  # a lower bound: recomputation takes time too
        figures.facts["copies hidden, by the clock, at least"] = (
            1 - max(step_s - plain_s, 0.0) / report.copy_s
        )


def _compare(
    name: str, references: Sequence[Steps], candidates: Sequence[Steps], figures: Figures
) -> None:
    """Bit-identical leaves by step, and the errors after the last step."""
    runs = [*zip(references, candidates, strict=True)]
    by_step = [
        [pair for run_pair in runs for pair in zip(*(steps[n] for steps in run_pair), strict=True)]
        for n in range(_STEPS)
    ]
    equal = [
        sum(reference.tobytes() == candidate.tobytes() for reference, candidate in leaves)
        for leaves in by_step
    ]
    figures.facts[f"{name}: leaves equal to the bit, by step"] = equal
    # The error is 1 for a bias that a softmax cancels.
    errors = [relative_error(*pair) for pair in by_step[-1]]
    worst, median = max(errors), statistics.median(errors)
    figures.facts[f"{name}: largest difference"] = f"{worst:.1e}, median leaf {median:.1e}"


def _unlike(plain: Mapping[str, str], planned: Mapping[str, str]) -> str:
    """How many of the kernels in both modules differ, and the names of the first five."""
    both = plain.keys() & planned.keys()
    changed = sorted(name for name in both if plain[name] != planned[name])
    return " ".join([f"{len(changed)} of {len(both)}", *changed[:5]])


def _after(run: Run, state: Any, batch: Any) -> list[list[np.ndarray]]:
    """Copies of what every step returns: the next step may overwrite its state."""
    outputs = []
    for _ in range(_STEPS):
        state, metrics = run(state, batch)
        outputs.append([np.array(leaf) for leaf in jax.tree.leaves((state, metrics))])
    return outputs


def _largest_workspace(module: Module) -> int:
    """Bytes of the largest workspace of a library call."""
    calls = (op for op in module.entry.ops.values() if op.opcode == "custom-call")
    return max(
        (leaf.nbytes for op in calls for leaf in op.result[1:] if leaf.dtype in ("s8", "u8")),
        default=0,
    )


def _host_bytes_free() -> int:
    return 1024 * int(Path("/proc/meminfo").read_text().partition("MemAvailable:")[2].split()[0])


def _over(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator is not None and denominator else None


if __name__ == "__main__":
    faulthandler.register(signal.SIGTERM, chain=True)  # a late row reports where it was
    row, figures = Row(**json.loads(sys.argv[1])), Figures()
    try:
        MEASURES[row.measure](row, Path(sys.argv[2]), figures)
    finally:
        figures.tell()
