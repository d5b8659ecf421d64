"""A step in so many slabs as are asked for, beside the step as it is, where both fit: what slabs cost by themselves."""

from typing import Any

from experiments.bench.cases import Case
from experiments.bench.results import Found
from memplan.compilation.compiler import Compiler
from memplan.compilation.limits import Limits
from memplan.compilation.outcome import Outcome
from memplan.hardware.device import Device
from memplan.planning.registry import planner_named
from memplan.planning.slabs.choice import Choice
from memplan.planning.slabs.price import Pricer, SlabLimits
from memplan.planning.slabs.slabs import Slabs, Walls, least_rows, trips_of
from memplan.program import compat
from memplan.program.ops import shape_of
from memplan.program.slabs.axis import SlabAxis
from memplan.program.slabs.choose import large_ops
from memplan.program.slabs.write import axis_at, with_slabs
from memplan.program.trace import Program, trace
from memplan.request import UNLIMITED, target_of

_AMPLE = SlabLimits(UNLIMITED, 0, 0)  # everything that loops write stays on the device


def measure(case: Case) -> Found:
    """A row for each number of slabs, the step as it is first."""
    step, args, donated = case.built()
    target, limits = target_of(case.device), Limits(UNLIMITED, UNLIMITED)
    program = trace(step, args, {}, {"donate_argnums": donated})
    compiler = Compiler(target, limits, planner_named(None), None, lambda _, __, make: make(), lambda _, __: None)
    plain = compiler.compile(program)
    rows = [{"slabs": 1, **_figures(plain, plain)}]
    for count in case.facts["counts"]:
        axis, slabs = in_slabs(program, target.device, case.facts["dim"], case.facts["part"], count)
        found = compiler.compile(with_slabs(program, slabs, axis))
        split = {"slabs": trips_of(axis.graph, slabs), "rows": slabs.rows, "ops": len(slabs.ops)}
        rows.append({**split, **_figures(found, plain)})
    return Found(rows)


def in_slabs(program: Program, device: Device, dim: int, part: int, count: int) -> tuple[SlabAxis, Slabs]:
    """So many slabs, or a few more where arrays have to be halved, along a dimension of the largest array.

    What touches an array as large as one of so many parts of that runs in them.
    """
    known = program.flat.values
    value = max(range(len(known)), key=lambda number: compat.nbytes_of(known[number].aval))
    axis = axis_at(program.flat, value, dim)
    ops = large_ops(axis.graph, compat.nbytes_of(known[value].aval) // part)
    least = least_rows(axis.graph, ops)
    rows = max(shape_of(known[value])[dim] // (count * least), 1) * least
    bare = Slabs(value, dim, rows, ops, frozenset(), frozenset())
    choice = Choice(Pricer(Walls(axis.graph, ops), device), bare, _AMPLE)
    slabs, _ = choice.refined(choice.best()[0])
    return axis, slabs


def _figures(found: Outcome, plain: Outcome) -> dict[str, Any]:
    return {"compiled_bytes": found.device_bytes, "step_s": found.step_s, "plain_step_s": plain.step_s}
