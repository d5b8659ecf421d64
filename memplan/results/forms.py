"""The forms that a step takes from its equations to the planned module, each as a readable file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from memplan import io
from memplan.compilation.outcome import Outcome
from memplan.compilation.scheduled import ScheduledModule
from memplan.planning.packing import live_nbytes
from memplan.planning.plan import name_actions
from memplan.planning.problem import Problem
from memplan.planning.schedule import Kind, Schedule, runs
from memplan.program import compat
from memplan.results.memory import Origins
from memplan.units import format_bytes, format_seconds
from memplan.xla.module import Module
from memplan.xla.serialize import serialize

_BAR = 40  # characters of the largest bar


def write_forms(outcome: Outcome, folder: str | os.PathLike[str]) -> Sequence[Path]:
    """Write each form of a step to a file of its own, numbered in the order in which they arise.

    Returns:
      The files.
    """
    planned = outcome.planned
    forms = {
        "program.txt": str(outcome.program.original.traced.jaxpr),
        "transforms.txt": "\n".join(_transforms(outcome)),
        "module.txt": _print(planned.plain.module),
        "kernels.txt": "\n".join(_kernels(planned.base)),
        "liveness.txt": "\n".join(_liveness(outcome)),
        "decisions.txt": "\n".join(_decisions(outcome)),
        "written.txt": _print(planned.result.module),
        "verdict.txt": "\n".join(_verdict(outcome)),
    }
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    files: list[Path] = []
    for number, (name, text) in enumerate(forms.items(), 1):
        files.append(path / f"{number}-{name}")
        io.write_atomic(files[-1], text.rstrip("\n") + "\n")
    return files


def _print(module: Module) -> str:
    return compat.module_text(serialize(module))


def _transforms(outcome: Outcome) -> Iterator[str]:
    """The decision of each transform, and the equations that they make."""
    program = outcome.program
    if not program.transforms:
        yield "No transform: XLA compiles the step as it was traced."
        return
    for transform in program.transforms:
        yield f"{transform.tag}: {transform}"
    yield ""
    yield str(program.jaxpr)


def _kernels(scheduled: ScheduledModule) -> Iterator[str]:
    """Each kernel with its seconds, what it reads and writes, and its source line."""
    problem, origins = scheduled.timed_problem, Origins(scheduled.module)

    def sizes(numbers: Sequence[int]) -> str:
        buffers = [problem.buffers[number] for number in numbers]
        return (
            ", ".join(f"{buffer.name} {format_bytes(buffer.nbytes)}" for buffer in buffers)
            or "nothing"
        )

    for number, kernel in enumerate(problem.kernels):
        indent = "  " * (1 + len(list(problem.blocks_around(number))))
        again = "" if kernel.recomputable else ", never again"
        source = origins.source(kernel.name)
        yield f"{number:5}{indent}{kernel.name}  {format_seconds(kernel.seconds)}{again}  {source}"
        yield f"     {indent}  {sizes(kernel.reads)} -> {sizes(kernel.writes)}"


def _liveness(outcome: Outcome) -> Iterator[str]:
    """Bytes of live temporaries at each action, unplanned and planned, and what is live at the
    peak.
    """
    planned = outcome.planned
    plain = planned.plain.problem
    yield from _live("as XLA scheduled the step", plain, runs(range(len(plain.kernels))))
    if planned.plan is not None:
        yield ""
        yield from _live("as it was planned", planned.base.problem, planned.schedule)


def _live(title: str, problem: Problem, schedule: Schedule) -> Iterator[str]:
    live = live_nbytes(problem, schedule).tolist()
    most = max([1, *live])
    yield f"Live temporaries, {title}: at most {format_bytes(max([0, *live]))}"
    for (kind, name), nbytes in zip(name_actions(problem, schedule), live, strict=False):
        bar = "#" * round(_BAR * nbytes / most)
        yield f"{format_bytes(nbytes):>10} {bar:{_BAR}} {kind.value} {name}"


def _decisions(outcome: Outcome) -> Iterator[str]:
    """What the plan does beside running each kernel once, in order."""
    planned = outcome.planned
    if planned.plan is None:
        yield "No plan: every value is kept from its computation to its last read."
        return
    problem, origins = planned.base.problem, Origins(planned.base.module)
    ran = set[str]()
    for position, (kind, name) in enumerate(name_actions(problem, planned.schedule)):
        if kind is Kind.RUN and name not in ran:
            ran.add(name)
            continue
        word = "recompute" if kind is Kind.RUN else kind.value
        yield f"{position:5}  {word:10} {name}  {origins.source(name)}"


def _verdict(outcome: Outcome) -> Iterator[str]:
    """Bytes and seconds, predicted and compiled, and what checked them."""
    planned, limits = outcome.planned, outcome.limits
    rows: Mapping[str, str] = {
        "method": outcome.method,
        "budget": format_bytes(limits.device_bytes),
        "predicted on the device": format_bytes(planned.predicted_bytes),
        "compiled on the device": format_bytes(outcome.device_bytes),
        "on the host": format_bytes(outcome.host_bytes),
        "fits": "yes" if outcome.fits else "no",
        "a step, predicted": format_seconds(outcome.step_s),
        "a step as XLA scheduled it": format_seconds(planned.plain.replay.step_s),
        "compilations": str(outcome.compilations),
        "explored, not compiled": str(outcome.explorations),
    }
    yield from (f"{name:28}{value}" for name, value in rows.items())
    yield ""
    if planned.written is None and not outcome.program.transforms:
        yield "XLA compiled the step unmodified."
    if planned.written is not None:
        yield "Each instruction of the written module computes an expression of XLA's own module,"
        yield "and nothing reads what was overwritten (memplan/verify/same_module.py)."
    if outcome.program.rewritten is not None:
        yield 'The equations were changed before XLA; verify="numbers" compares the results'
        yield "(memplan/verify/numbers.py)."
    for rejected in outcome.rejected:
        yield (
            f"not chosen: {rejected.method}, {format_bytes(rejected.device_bytes)}, "
            f"{format_seconds(rejected.step_s)}{'' if rejected.fits else ', does not fit'}"
        )
