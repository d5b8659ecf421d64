"""Ten training steps in slabs against ten as they are, and against what recompilation alone does to those.

All that an axis goes through runs in slabs: once so that loops write down what kernels make, once so that they make
everything again. Recompilation alone: the step in pieces of a few equations, or begun an ulp beside.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench.cases import Case
from experiments.bench.results import Found
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
_PIECES = (5, 12)  # equations that are compiled together
Leaves = list[Any]
Run = Callable[[Leaves], Leaves]


def measure(case: Case) -> Found:
    """A row for each choice of what is written."""
    step, args, _ = case.built()
    program = trace(step, args, {}, {})
    leaves, count = jax.tree.leaves(args), len(jax.tree.leaves(args[0]))
    plain = jax.jit(compat.jaxpr_as_fun(program.jaxpr))
    expected = trained(plain, leaves, count)
    beside = [nudged(leaf) if number < count else leaf for number, leaf in enumerate(leaves)]
    others = [trained(in_pieces(program.jaxpr, length, {}), leaves, count) for length in _PIECES]
    others.append(trained(plain, beside, count))
    places = _places(args[0])
    *pieces, ulp = (difference(expected, one, places) for one in others)
    alone = {f"pieces_{name}": max(one[name] for one in pieces) for name in ulp}
    alone |= {f"ulp_{name}": value for name, value in ulp.items()}
    rows = []
    for name, made in in_slabs(program, case.facts["face"]):
        [record] = made.in_slabs
        found = trained(jax.jit(compat.jaxpr_as_fun(channels_last(made.jaxpr))), leaves, count)
        counts = {"loops": len(record.loops), "in_slabs": len(record.slabs.ops), "ops": len(record.graph.graph.ops)}
        worst = worst_array(expected, others, found, places)
        rows.append({"written": name, **counts, **difference(expected, found, places), **alone, "worst_array": worst})
    return Found(rows)


def in_slabs(program: Program, face: Face) -> Iterator[tuple[str, Program]]:
    """All ops on the axis in loops: what is written, and the program."""
    value = next(n for n, var in enumerate(program.flat.values) if shape_of(var) == face.shape)
    axis = axis_at(program.flat, value, face.dim)
    ops = frozenset(axis.graph.along)
    assert face.rows % least_rows(axis.graph, ops) == 0 and face.rows < face.shape[face.dim]
    for name, stored in (("what kernels make", made_by_kernels(axis)), ("sums alone", frozenset[int]())):
        yield name, with_slabs(program, Slabs(value, face.dim, face.rows, ops, stored, frozenset()), axis)


def made_by_kernels(axis: SlabAxis) -> frozenset[int]:
    ops, along = axis.graph.graph.ops, axis.graph.along
    kernels = (number for number, one in along.items() if ops[number].fusion == "kernel" and not one.reduces)
    return frozenset(value for number in kernels for value in ops[number].outputs)


def trained(step: Run, leaves: Sequence[Any], count: int) -> list[Leaves]:
    """What every step returns; the first `count` arguments and results are the state."""
    state, batch, found = leaves[:count], leaves[count:], []
    for _ in range(STEPS):
        results = step([*state, *batch]) if not hasattr(step, "lower") else step(*state, *batch)
        state = results[:count]
        found.append(list(map(np.asarray, results)))
    return found


def nudged(leaf: Any) -> Any:
    """Every number an ulp greater."""
    return jnp.nextafter(leaf, jnp.inf) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf


def _places(state: Any) -> list[int]:
    """Of parameters and running statistics among the leaves of a state."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    return [number for number, path in enumerate(paths) if path[0].name in ("params", "batch_stats")]


def difference(expected: list[Leaves], found: list[Leaves], places: Sequence[int]) -> Mapping[str, float]:
    """Of the losses of all steps the greatest, relative; of the parameters after the last, its length by theirs."""
    pairs = [(expected[-1][place].astype(np.float64), found[-1][place].astype(np.float64)) for place in places]
    length = np.sqrt(sum(np.square(one - other).sum() for one, other in pairs))
    losses = [abs(one[-1] - other[-1]) / abs(one[-1]) for one, other in zip(expected, found, strict=True)]
    whole = np.sqrt(sum(np.square(one).sum() for one, _ in pairs))
    return {"loss": float(max(losses)), "parameters": float(length / whole)}


def worst_array(
    expected: list[Leaves], others: list[list[Leaves]], found: list[Leaves], places: Sequence[int]
) -> float:
    """Of all arrays of parameters, the most that one differs, by what the numbers gate allows it."""
    last = [[steps[-1][place] for place in places] for steps in (expected, others[0], found, *others[1:])]
    return max(leaf.planned / leaf.tolerance for leaf in compare(*last).leaves)
