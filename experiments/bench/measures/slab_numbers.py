"""The error of ten training steps in slabs, next to the error that recompilation alone introduces.

Everything along an axis runs in slabs: once with loops that store the kernels' outputs, once with
loops that recompute everything. Recompilation alone: the step compiled in pieces of a few
equations, or started one ulp off.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench.cases import Case
from experiments.bench.results import Measurement
from experiments.bench.slab_steps import Face
from memplan.planning.slabs.slabs import Slabs, least_rows
from memplan.program import compat
from memplan.program.lowerable import channels_last
from memplan.program.ops import shape_of
from memplan.program.slabs.axis import SlabAxis
from memplan.program.slabs.write import axis_at, with_slabs
from memplan.program.trace import Program, trace
from memplan.verify.numbers import compare, in_pieces

STEPS = 10
_PIECES = (5, 12)  # Equations that are compiled together.
Leaves = list[Any]
Run = Callable[[Leaves], Leaves]


def measure(case: Case) -> Measurement:
    """A row for each choice of what loops store."""
    step, args, _ = case.built()
    program = trace(step, args, {}, {})
    leaves, count = jax.tree.leaves(args), len(jax.tree.leaves(args[0]))
    plain = jax.jit(compat.jaxpr_as_fun(program.jaxpr))
    expected = trained(plain, leaves, count)
    beside = [nudged(leaf) if number < count else leaf for number, leaf in enumerate(leaves)]
    recompiled = [
        trained(in_pieces(program.jaxpr, length, {}), leaves, count) for length in _PIECES
    ]
    recompiled.append(trained(plain, beside, count))
    places = _places(args[0])
    *pieces, ulp = (difference(expected, run, places) for run in recompiled)
    alone = {f"pieces_{name}": max(piece[name] for piece in pieces) for name in ulp}
    alone |= {f"ulp_{name}": value for name, value in ulp.items()}
    rows = []
    for name, slab_program in in_slabs(program, case.facts["face"]):
        [record] = slab_program.in_slabs
        sliced = trained(
            jax.jit(compat.jaxpr_as_fun(channels_last(slab_program.jaxpr))), leaves, count
        )
        counts = {
            "loops": len(record.loops),
            "in_slabs": len(record.transform.ops),
            "ops": len(record.graph.graph.ops),
        }
        worst = worst_array(expected, recompiled, sliced, places)
        rows.append(
            {
                "written": name,
                **counts,
                **difference(expected, sliced, places),
                **alone,
                "worst_array": worst,
            }
        )
    return Measurement(rows)


def in_slabs(program: Program, face: Face) -> Iterator[tuple[str, Program]]:
    """Put all ops along the axis in loops; yields what they store, and the program."""
    value = next(n for n, var in enumerate(program.flat.values) if shape_of(var) == face.shape)
    axis = axis_at(program.flat, value, face.dim)
    ops = frozenset(axis.graph.along)
    assert face.rows % least_rows(axis.graph, ops) == 0 and face.rows < face.shape[face.dim]
    for name, stored in (
        ("what kernels make", kernel_outputs(axis)),
        ("sums alone", frozenset[int]()),
    ):
        yield (
            name,
            with_slabs(program, Slabs(value, face.dim, face.rows, ops, stored, frozenset()), axis),
        )


def kernel_outputs(axis: SlabAxis) -> frozenset[int]:
    ops, along = axis.graph.graph.ops, axis.graph.along
    kernels = (
        number for number, op in along.items() if ops[number].fusion == "kernel" and not op.reduces
    )
    return frozenset(value for number in kernels for value in ops[number].outputs)


def trained(step: Run, leaves: Sequence[Any], count: int) -> list[Leaves]:
    """The results of every step; the first `count` arguments and results are the state."""
    state, batch, outputs = leaves[:count], leaves[count:], []
    for _ in range(STEPS):
        results = step([*state, *batch]) if not hasattr(step, "lower") else step(*state, *batch)
        state = results[:count]
        outputs.append(list(map(np.asarray, results)))
    return outputs


def nudged(leaf: Any) -> Any:
    """Every number one ulp larger."""
    return jnp.nextafter(leaf, jnp.inf) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf


def _places(state: Any) -> list[int]:
    """Positions of parameters and running statistics among the leaves of a state."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    return [
        number for number, path in enumerate(paths) if path[0].name in ("params", "batch_stats")
    ]


def difference(
    expected: list[Leaves], sliced: list[Leaves], places: Sequence[int]
) -> Mapping[str, float]:
    """Largest relative error of the losses; relative error, as a norm, of the final parameters."""
    pairs = [
        (expected[-1][place].astype(np.float64), sliced[-1][place].astype(np.float64))
        for place in places
    ]
    length = np.sqrt(sum(np.square(reference - value).sum() for reference, value in pairs))
    losses = [
        abs(reference[-1] - value[-1]) / abs(reference[-1])
        for reference, value in zip(expected, sliced, strict=True)
    ]
    whole = np.sqrt(sum(np.square(reference).sum() for reference, _ in pairs))
    return {"loss": float(max(losses)), "parameters": float(length / whole)}


def worst_array(
    expected: list[Leaves],
    recompiled: list[list[Leaves]],
    sliced: list[Leaves],
    places: Sequence[int],
) -> float:
    """The largest error of any parameter array over the tolerance of the numbers gate."""
    last = [
        [steps[-1][place] for place in places]
        for steps in (expected, recompiled[0], sliced, *recompiled[1:])
    ]
    return max(leaf.planned / leaf.tolerance for leaf in compare(*last).leaves)
