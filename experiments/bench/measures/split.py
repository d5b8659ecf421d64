"""The cost of slabs: a step in a given number of slabs beside the plain step, both of which fit."""

from typing import Any

from experiments.bench.cases import Case
from experiments.bench.results import Measurement
from memplan.compilation.compiler import Compiler
from memplan.compilation.limits import Limits
from memplan.compilation.outcome import Outcome
from memplan.hardware.device import Device
from memplan.planning.registry import planner_named
from memplan.planning.slabs.choice import Choice
from memplan.planning.slabs.cut import SlabCuts
from memplan.planning.slabs.price import Pricer, SlabLimits
from memplan.planning.slabs.slabs import Slabs, Walls, least_rows, trips_of
from memplan.program import compat
from memplan.program.ops import shape_of
from memplan.program.slabs.axis import SlabAxis
from memplan.program.slabs.choose import large_ops
from memplan.program.slabs.write import axis_at, with_slabs
from memplan.program.trace import Program, trace
from memplan.request import UNLIMITED, target_of

_AMPLE = SlabLimits(UNLIMITED, 0, 0)  # Keeps everything that loops write on the device.


def measure(case: Case) -> Measurement:
    """A row for each number of slabs, the plain step first."""
    step, args, donated = case.built()
    target, limits = target_of(case.device), Limits(UNLIMITED, UNLIMITED)
    program = trace(step, args, {}, {"donate_argnums": donated})
    compiler = Compiler(
        target, limits, planner_named(None), None, lambda _, __, make: make(), lambda _, __: None
    )
    plain = compiler.compile(program)
    rows = [{"slabs": 1, **_figures(plain, plain)}]
    for count in case.facts["counts"]:
        axis, slabs = in_slabs(program, target.device, case.facts["dim"], case.facts["part"], count)
        outcome = compiler.compile(with_slabs(program, slabs, axis))
        split = {"slabs": trips_of(axis.graph, slabs), "rows": slabs.rows, "ops": len(slabs.ops)}
        rows.append({**split, **_figures(outcome, plain)})
    return Measurement(rows)


def in_slabs(
    program: Program, device: Device, dim: int, part: int, count: int
) -> tuple[SlabAxis, Slabs]:
    """`count` slabs, or a few more where sizes must divide, along an axis of the largest array.

    They contain the operations on arrays of at least one `part`-th of the largest array.
    """
    values = program.flat.values
    value = max(range(len(values)), key=lambda number: compat.nbytes_of(values[number].aval))
    axis = axis_at(program.flat, value, dim)
    ops = large_ops(axis.graph, compat.nbytes_of(values[value].aval) // part)
    smallest = least_rows(axis.graph, ops)
    rows = max(shape_of(values[value])[dim] // (count * smallest), 1) * smallest
    bare = Slabs(value, dim, rows, ops, frozenset(), frozenset())
    choice = Choice(SlabCuts(Pricer(Walls(axis.graph, ops), device)), bare, _AMPLE)
    slabs, _ = choice.refined(choice.best()[0])
    return axis, slabs


def _figures(outcome: Outcome, plain: Outcome) -> dict[str, Any]:
    return {
        "compiled_bytes": outcome.device_bytes,
        "step_s": outcome.step_s,
        "plain_step_s": plain.step_s,
    }
