"""A planned step on the local backend: one program where the compiler keeps the order, segments where it does not."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from memplan.errors import MemplanError
from memplan.pipeline import Result, local_jaxpr
from memplan.planning.budget import parse_bytes
from memplan.planning.graph import Graph
from memplan.planning.layout import chop, cut
from memplan.planning.order import early_loose_ends
from memplan.planning.plan import Plan
from memplan.planning.planners.protocol import fence_nbytes
from memplan.planning.unfold import keep_everything
from memplan.program import compat
from memplan.program.executor import Stages, as_array, compile_stages
from memplan.program.extract import extract
from memplan.program.host_state import brought, put
from memplan.xla.local import local_device
from memplan.program.rewrite import rewrite
from memplan.program.trace import Program, as_step, dynamic_part, flat_step, trace
from memplan.verify.pieces import run_in_pieces
from memplan.verify.program import Gate, compare, roundings

_CHOPS = (5, 12)  # operations per segment

# XLA may keep more bits than a type has inside a kernel; which values then lose them depends on where kernels end. For
# the gate every value is rounded to its type, in every program: what recomputes a bfloat16 value gets the same bits.
AS_TYPED = {"xla_allow_excess_precision": False}


class Runner:
    """Calls the step with its dynamic arguments."""

    def __init__(self, program: Program, call: Any, stages: Stages | None):
        self._program = program
        self._call = call
        self._stages = stages
        self._in_tree = program.traced.in_tree
        self.ran = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.ran = True
        if self._stages is None:
            return self._call(*args, **kwargs)
        leaves, tree = jax.tree_util.tree_flatten((args, kwargs))
        del args, kwargs
        self._check(leaves, tree)
        arrays = [as_array(leaf, aval) for leaf, aval in zip(leaves, self._avals, strict=True)]
        del leaves
        for position in self._program.held:
            arrays[position] = self._brought(arrays[position], position)
        results = self._stages(arrays)
        for position in self._program.returned_to_host:
            results[position] = put(results[position], on_host=True)
        return jax.tree_util.tree_unflatten(self._program.out_tree, results)

    def _brought(self, array: jax.Array, position: int) -> jax.Array:
        """A copy of host memory for the stages; where the argument is donated, in its place."""
        found = brought(array)
        if self._program.donated[position] and found is not array:
            found.block_until_ready()
            array.delete()
        return found

    @functools.cached_property
    def _avals(self) -> list[Any]:
        return [compat.aval_of(var) for var in self._program.traced.jaxpr.jaxpr.invars]

    def _check(self, leaves: Sequence[Any], tree: Any) -> None:
        """Like jax's own executables: TypeError for other structures or types than it was compiled for."""
        if tree != self._in_tree:
            raise TypeError(f"the step was planned for arguments of structure {self._in_tree}, not {tree}.")
        for leaf, aval, name in zip(leaves, self._avals, self._program.names, strict=True):
            found: Any = jax.typeof(leaf)
            if (found.shape, found.dtype) != (aval.shape, aval.dtype):
                raise TypeError(f"the step was planned for {name}: {aval.str_short()}, not {found.str_short()}.")


def runner(result: Result) -> Runner:
    """Make a planned step run here, whatever device it was planned for."""
    program, chosen = result.program, result.chosen
    if chosen.plan is not None and jax.default_backend() == "cpu":
        assert result.graph is not None
        flags = dict(program.options.get("compiler_options") or {}) or None
        return Runner(program, None, chosen.stages or compile_stages(program, result.graph, chosen.plan, flags))
    if not result.target.described and chosen.executable is not None:
        return Runner(program, chosen.executable.compiled, None)
    step = program.step if chosen.plan is None else as_step(program, local_jaxpr(result))
    options = {name: value for name, value in program.options.items() if name != "compiler_options"}
    flags = {**(program.options.get("compiler_options") or {})}
    if chosen.plan is not None:
        flags |= chosen.compiler_options
    lowered = jax.jit(step, **options).lower(*result.args, **result.kwargs)
    return Runner(program, lowered.compile(compiler_options=flags or None), None)


def segmented_plan(graph: Graph, budget_bytes: int, device: str) -> Plan:
    """The step cut into segments as under this budget, nothing recomputed or moved: what recompilation alone does."""
    return keep_everything(cut(graph, early_loose_ends(graph), fence_nbytes(budget_bytes)), device)


def chopped_plans(graph: Graph, device: str) -> tuple[Plan, ...]:
    """The step cut in other ways, likewise unchanged: how much depends on where the cuts fall."""
    order = early_loose_ends(graph)
    return tuple(keep_everything(chop(graph, order, length), device) for length in _CHOPS)


def numbers_gate(result: Result, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Gate:
    """Run the unmodified, the segmented and the planned step on the same inputs, rounded `AS_TYPED`, and compare.

    Raises:
      MemplanError: the arguments are shapes, not arrays.
    """
    program = result.program
    dynamic = dynamic_part(program.step, args, kwargs, program.options)
    leaves = jax.tree_util.tree_leaves(dynamic)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        raise MemplanError('verify="numbers" runs the step: pass arrays to plan(), not jax.ShapeDtypeStructs.')
    if result.chosen.plan is None or result.graph is None:
        return Gate(())
    written = program.as_written
    graph = extract(written)
    plain = jax.jit(flat_step(written, written.jaxpr), compiler_options=AS_TYPED)
    device = result.report.device
    segmented = run_flat(written, graph, segmented_plan(graph, result.report.budget_bytes, device), leaves)
    planned = run_flat(program, result.graph, result.chosen.plan, leaves)
    if program.loops:  # loops are recompiled too
        chopped = [run_in_pieces(written.jaxpr, leaves, length, AS_TYPED) for length in _CHOPS]
    else:
        chopped = [run_flat(written, graph, plan, leaves) for plan in chopped_plans(graph, device)]
    coarsest = roundings(graph, written.jaxpr.jaxpr.outvars)
    return compare(plain(*leaves), segmented, planned, *chopped, coarsest=coarsest)


def run_flat(program: Program, graph: Graph, plan: Plan, leaves: Sequence[Any]) -> list[Any]:
    """Outputs of a plan on copies of flat inputs, on the local backend, values rounded `AS_TYPED`."""
    arrays = [as_array(leaf, var.aval) for leaf, var in zip(leaves, program.traced.jaxpr.jaxpr.invars, strict=True)]
    copies = [array.copy() for array in arrays]
    if jax.default_backend() == "cpu":
        return compile_stages(program, graph, plan, AS_TYPED)(copies)
    return jax.jit(flat_step(program, rewrite(program, graph, plan)), compiler_options=AS_TYPED)(*copies)


def segmented(step: Any, args: Sequence[Any], budget: Any, **options: Any) -> Runner:
    """The step cut into segments as for this budget, and otherwise unchanged, on the local backend."""
    program = trace(step, args, {}, options)
    graph = extract(program)
    plan = segmented_plan(graph, parse_bytes(budget, local_device().memory_bytes), "local")
    return Runner(program, None, compile_stages(program, graph, plan))
