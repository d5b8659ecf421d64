"""Does XLA compile every convolution that slabs write? Each step has a process, as some abort.

Steps that differentiate convolutions twice are put in slabs along a random axis, compiled for the
CPU and a described GPU, run on the CPU and compared with the plain step. Every tenth step is also
planned within a share of its bytes, for both. Numbers may differ by the error of recompilation
alone.
"""

import os
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from typing import Any

import jax
import numpy as np

import memplan
from experiments.bench.cases import Case
from experiments.bench.measures.slab_numbers import kernel_outputs
from experiments.bench.results import Measurement, Row
from experiments.bench.second_order import drawn_step
from memplan.hardware import catalog
from memplan.planning.slabs.slabs import Slabs, least_rows
from memplan.program import compat
from memplan.program.lowerable import Lowerable, channels_last
from memplan.program.ops import shape_of
from memplan.program.slabs.write import axis_at, with_slabs
from memplan.program.trace import Program, trace
from memplan.verify.numbers import compare, in_pieces, relative_error, roundings
from memplan.xla.target import Target

GPU = "v100"
_PLANNED = 10  # Plan every tenth step: planning takes ten times as long as slabs alone.
_SHARES = (0.8, 0.7, 0.6, 0.5, 0.4)
_LIKE_ROUNDING = 1e-5  # Relative errors above this go through the numbers gate.
_PIECES = (5, 12)  # Equations that are compiled together.
_SECONDS = 600
_COUNTED = ("loops", "convolutions", "plans", "plans_in_slabs")
_QUICK = {"xla_backend_optimization_level": 0}  # Speeds up LLVM; XLA's own passes stay the same.


def measure(case: Case) -> Measurement:
    """One row for many steps; names those that abort or go wrong in another way."""
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        numbers = range(case.facts["first"], case.facts["first"] + case.facts["count"])
        record = dict(zip(numbers, threads.map(alone, numbers), strict=True))
    sums = {name: sum(record[name] for record in record.values()) for name in _COUNTED}
    wrong = {str(number): record["wrong"] for number, record in record.items() if record["wrong"]}
    return Measurement([{"steps": len(record), **sums, "gpu": GPU, "wrong": wrong}])


def alone(number: int) -> Row:
    """Test a step in a process of its own; `wrong` says what it was doing if that ended."""
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_tell, args=(number, theirs))
    process.start()
    theirs.close()
    record: dict[str, Any] = {**dict.fromkeys(_COUNTED, 0), "wrong": ""}
    at = "began"
    try:
        while ours.poll(_SECONDS) and (said := ours.recv()):
            at = said.pop("at", at)
            record.update({name: value for name, value in said.items() if value != ""})
    except EOFError:
        pass
    process.join(1)
    process.kill()
    process.join()
    if process.exitcode:
        record["wrong"] = f"{at}: ended with {process.exitcode}"
    return record


def _tell(number: int, connection: Any) -> None:
    jax.config.update("jax_platforms", "cpu")
    try:
        for said in judged(number):
            connection.send(said)
    except Exception as error:
        connection.send({"wrong": f"{type(error).__name__}: {error}"[:300]})
    connection.send({})


def judged(number: int) -> Iterator[dict[str, Any]]:
    """Test a step; yields what is being done, and results."""
    step, args = drawn_step(number)
    draw = random.Random(number)
    program, leaves = trace(step, args, {}, {}), jax.tree.leaves(args)
    yield {"at": "as it is"}
    expected = _run(compat.jaxpr_as_fun(program.jaxpr), leaves)
    in_slabs = in_some_slabs(program, draw)
    if in_slabs is not None:
        loops = len(in_slabs.in_slabs[0].loops)
        yield {
            "at": "slabs on the CPU",
            "loops": loops,
            "convolutions": str(in_slabs.jaxpr).count("conv_general_dilated["),
        }
        results = _run(compat.jaxpr_as_fun(channels_last(in_slabs.jaxpr)), leaves)
        yield {"wrong": _difference(program, leaves, expected, results)}
        yield {"at": "slabs on the GPU"}
        shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
        target = Target(catalog.named(GPU), described=True)
        target.compile(Lowerable(compat.jaxpr_as_fun(in_slabs.jaxpr), shapes), _QUICK)
    if number % _PLANNED == 0:
        plain_bytes = memplan.jit(step).plan(*args).report.compiled_peak_bytes
        assert plain_bytes is not None
        plans = []
        for device in (None, GPU):
            share = draw.choice(_SHARES)
            yield {"at": f"a plan within {share:.0%} on {device or 'the CPU'}"}
            try:
                plans.append(
                    memplan.jit(step, budget=int(plain_bytes * share), device=device).plan(*args)
                )
            except memplan.InfeasibleBudgetError:
                continue
            yield {
                "plans": len(plans),
                "plans_in_slabs": sum(bool(plan.report.slab_loops) for plan in plans),
            }
            if device is None:
                results = [*map(np.asarray, jax.tree.leaves(plans[-1].compile()(*args)))]
                yield {"wrong": _difference(program, leaves, expected, results)}


def in_some_slabs(program: Program, draw: random.Random) -> Program | None:
    """Put all ops on a random axis in loops over slabs; None if no axis has two slabs."""
    shapes = [*map(shape_of, program.flat.values)]
    deep = [(value, shape) for value, shape in enumerate(shapes) if len(shape) > 2]
    places = [(value, dim) for value, shape in deep for dim, size in enumerate(shape) if size > 1]
    for value, dim in draw.sample(places, len(places)):
        axis = axis_at(program.flat, value, dim)
        ops = frozenset(axis.graph.along)
        size = shapes[value][dim]
        if len(ops) < 5 or (smallest := least_rows(axis.graph, ops)) >= size:
            continue
        rows = smallest * draw.randint(1, max(1, (size - 1) // smallest // 2))
        stored = kernel_outputs(axis)
        return with_slabs(
            program,
            Slabs(value, dim, rows, ops, draw.choice((stored, frozenset())), frozenset()),
            axis,
        )
    return None


def _run(step: Callable[..., Any], leaves: Sequence[Any]) -> list[np.ndarray]:
    return [*map(np.asarray, jax.jit(step).lower(*leaves).compile(_QUICK)(*leaves))]


def _difference(
    program: Program, leaves: Sequence[Any], expected: Sequence[Any], results: Sequence[Any]
) -> str:
    """The numbers gate's verdict if it does not pass, else ""."""
    if max(map(relative_error, expected, results)) < _LIKE_ROUNDING:
        return ""
    pieces = [in_pieces(program.jaxpr, length, {})(leaves) for length in _PIECES]
    gate = compare(expected, pieces[0], results, *pieces[1:], coarsest=roundings(program.jaxpr))
    return "" if gate.passes else str(gate)
