"""Runs a plan where the compiler keeps no order: every segment is compiled apart and run in turn, freeing in between.

XLA:CPU drops barriers and schedules from data dependencies alone. Between two executables nothing can be reordered, so
the plan's order and its lifetimes hold exactly. Host memory and device memory are the same there: an offloaded value
stays where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec, Sharding

from memplan.planning.graph import Graph
from memplan.planning.plan import Action, Kind, Plan
from memplan.program import compat, rules
from memplan.program.spmd import Spmd, over_mesh
from memplan.program.trace import Program, flatten


@dataclass(frozen=True)
class Stage:
    """One compiled segment: value ids in, value ids out, and what lives on the device meanwhile.

    Attributes:
      reads: those whose buffers the segment may overwrite come first.
      drops: values that end with it.
      temp_nbytes: temporaries and outputs that are not written over inputs, by the compiler.
    """

    run: Callable[..., Sequence[Any]]
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    drops: tuple[int, ...]
    temp_nbytes: int


@dataclass(frozen=True)
class Stages:
    """A plan compiled segment by segment.

    Attributes:
      peak_nbytes: largest device bytes over all segments, the compiler's account of each on top of what is alive.
      peak_by_segment: the same per segment.
      in_turn: each waits for the one before. Several devices of one process share threads: where some wait in one
        segment's collective and the rest in another's, all wait for ever.
    """

    graph: Graph
    stages: tuple[Stage, ...]
    consts: tuple[Any, ...]
    literals: tuple[Any, ...]
    peak_by_segment: tuple[int, ...]
    in_turn: bool = False

    @property
    def peak_nbytes(self) -> int:
        return max(self.peak_by_segment, default=self.graph.resident_nbytes)

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """Run on the flat inputs of the program; donated ones are consumed."""
        values = dict(zip(self.graph.inputs, [*inputs, *self.consts], strict=True))
        del inputs
        for stage in self.stages:
            made = stage.run(*[values[value] for value in stage.reads])
            if self.in_turn:
                jax.block_until_ready(made)
            values.update(zip(stage.makes, made, strict=True))
            for value in stage.drops:
                dropped = values.pop(value, None)
                if dropped is not None and self.graph.values[value].donated and not dropped.is_deleted():
                    dropped.delete()  # the caller still holds it
        returned = iter(self.graph.outputs)
        return [values[next(returned)] if literal is None else literal for literal in self.literals]


def compile_stages(
    program: Program, graph: Graph, plan: Plan, compiler_options: dict[str, Any] | None = None
) -> Stages:
    """Compile every segment of a plan for the local backend."""
    plan.check(graph)
    segments = list(plan.segments())
    builder = _Builder(program, graph, segments, compiler_options)
    stages, peaks = builder.build()
    literals = tuple(
        as_array(atom.val, atom.aval) if isinstance(atom, compat.Literal) else None
        for atom in program.jaxpr.jaxpr.outvars
    )
    consts = tuple(value for _, value in compat.consts_of(program.jaxpr))
    return Stages(graph, tuple(stages), consts, literals, tuple(peaks), program.spmd is not None)


class _Builder:
    """Walks the segments; equal segments share one executable."""

    def __init__(self, program: Program, graph: Graph, segments: list[tuple[Action, ...]], options: Any):
        self.eqns = program.jaxpr.jaxpr.eqns
        self.avals, self.shardings = self.types(program)
        self.spmd = program.spmd
        self.graph = graph
        self.segments = segments
        self.options = options
        self.known: dict[Any, Any] = {}

    def types(self, program: Program) -> tuple[list[Any], list[Sharding | None]]:
        """Type and sharding of every value."""
        variables = [*program.jaxpr.jaxpr.invars, *(var for var, _ in compat.consts_of(program.jaxpr))]
        variables += [var for eqn in self.eqns for var in eqn.outvars]
        avals = [var.aval for var in variables]
        if program.spmd is None:
            return avals, [program.placements.get(var) for var in variables]
        return avals, [program.spmd.sharding(spec) for spec in _specs(program, program.spmd, variables)]

    def build(self) -> tuple[list[Stage], list[int]]:
        alive = frozenset(self.graph.inputs)
        stages, peaks = [], []
        for segment, after in zip(self.segments, self.alive_after(), strict=True):
            stage = self.stage(segment, alive, after)
            stages.append(stage)
            peaks.append(sum(map(self.graph.nbytes, alive)) + stage.temp_nbytes)
            alive = after
        return stages, peaks

    def alive_after(self) -> list[frozenset[int]]:
        """Values that have a copy somewhere after each segment; a donated argument ends with its last reader."""
        device, host = set(self.graph.inputs), set[int]()
        last_read = self.last_reads()
        found = []
        for number, segment in enumerate(self.segments):
            for action in segment:
                match action.kind:
                    case Kind.COMPUTE:
                        device.update(self.graph.ops[action.target].outputs)
                    case Kind.OFFLOAD:
                        host.add(action.target)
                    case Kind.PREFETCH:
                        device.add(action.target)
                    case Kind.RELEASE:
                        host.discard(action.target)
                    case Kind.FREE:
                        device.discard(action.target)
            device.difference_update(last_read.get(number, ()))
            found.append(frozenset(device | host))
        return found

    def last_reads(self) -> dict[int, list[int]]:
        """Segment -> donated arguments that nothing reads later."""
        donated = {v for v in self.graph.inputs if self.graph.values[v].donated and v not in self.graph.returned}
        last = dict.fromkeys(donated, 0)
        for number, segment in enumerate(self.segments):
            for op in _ops(segment):
                last.update((value, number) for value in self.graph.ops[op].inputs if value in donated)
        ending: dict[int, list[int]] = {}
        for value, number in last.items():
            ending.setdefault(number, []).append(value)
        return ending

    def stage(self, segment: Sequence[Action], alive: frozenset[int], after: frozenset[int]) -> Stage:
        ops = _ops(segment)
        computed = dict.fromkeys(value for op in ops for value in self.graph.ops[op].outputs)
        made: set[int] = set()
        reads: dict[int, None] = {}
        for op in ops:
            reads.update((value, None) for value in self.graph.ops[op].inputs if value not in made)
            made.update(self.graph.ops[op].outputs)
        makes = tuple(value for value in computed if value in after and value not in alive)
        drops = tuple(sorted(alive - after))
        if not makes and not any(self.eqns[op].effects for op in ops):
            return Stage(lambda *_: (), (), (), drops, 0)
        given = [value for value in reads if value in drops]
        order = (*given, *(value for value in reads if value not in drops))
        jaxpr = jax.make_jaxpr(lambda *values: self.evaluate(ops, order, makes, values))(
            *[compat.as_struct(self.avals[value]) for value in order]
        )
        matched = _matched([self.type_of(value) for value in given], [self.type_of(value) for value in makes])
        placed = tuple(tuple(self.shardings[value] for value in values) for values in (order, makes))
        compiled = self.compiled(jaxpr, ops, matched, placed)
        stats = compiled.memory_analysis()
        temp = stats.temp_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
        return Stage(compiled, order, makes, drops, temp)

    def type_of(self, value: int) -> tuple[Any, ...]:
        """What two values must share for one to take the other's buffer."""
        return self.avals[value].shape, self.avals[value].dtype, self.shardings[value]

    def compiled(self, jaxpr: compat.ClosedJaxpr, ops: list[int], donated: tuple[int, ...], placed: Any) -> Any:
        plain = all(rules.is_plain(self.eqns[op]) for op in ops)
        key = (str(jaxpr), donated, placed) if plain else (tuple(ops), donated, len(self.known))
        if key not in self.known:
            reads, makes = map(list, placed)
            shardings: dict[str, Any] = {"in_shardings": reads, "out_shardings": makes} if any([*reads, *makes]) else {}
            flat, avals = self.over_mesh(jaxpr, reads, makes)
            jitted = jax.jit(flat, donate_argnums=donated, keep_unused=True, **shardings)
            self.known[key] = jitted.lower(*avals).compile(compiler_options=self.options)
        return self.known[key]

    def over_mesh(self, jaxpr: compat.ClosedJaxpr, reads: list[Any], makes: list[Any]) -> tuple[Any, list[Any]]:
        """A segment as a function of flat arrays, and their types; what each device has of its own is stacked."""
        evaluate = compat.jaxpr_as_fun(jaxpr)
        avals = [compat.as_struct(var.aval) for var in jaxpr.jaxpr.invars]
        if self.spmd is None:
            return evaluate, avals
        stacked = self.spmd.stacked
        lone_in = [not aval.shape and known.spec == stacked for aval, known in zip(avals, reads, strict=True)]
        outs = [compat.aval_of(var) for var in jaxpr.jaxpr.outvars]
        lone_out = [not aval.shape and known.spec == stacked for aval, known in zip(outs, makes, strict=True)]

        def local(*operands: Any) -> list[Any]:
            given = [x.reshape(()) if lone else x for x, lone in zip(operands, lone_in, strict=True)]
            return [x.reshape(1) if lone else x for x, lone in zip(evaluate(*given), lone_out, strict=True)]

        wide = [self.spmd.whole(aval, known.spec) for aval, known in zip(avals, reads, strict=True)]
        specs = [known.spec for known in reads], [known.spec for known in makes]
        return over_mesh(local, self.spmd.mesh, *specs), wide

    def evaluate(self, ops: list[int], reads: Sequence[int], makes: Sequence[int], operands: Any) -> list[Any]:
        values = dict(zip(reads, operands, strict=True))
        for op in ops:
            eqn, known = self.eqns[op], iter(self.graph.ops[op].inputs)
            inputs = [a.val if isinstance(a, compat.Literal) else values[next(known)] for a in eqn.invars]
            with compat.as_written(eqn):
                values.update(zip(self.graph.ops[op].outputs, in_one_memory(eqn, inputs), strict=True))
        return [values[value] for value in makes]


def _specs(program: Program, spmd: Spmd, variables: Sequence[Any]) -> list[Any]:
    """Inputs and outputs as the step has them, constants whole; what else a device makes is its own."""
    known = {var: PartitionSpec() for var, _ in compat.consts_of(program.jaxpr)}
    outvars = zip(program.jaxpr.jaxpr.outvars, spmd.outputs, strict=True)
    known.update((atom, spec) for atom, spec in outvars if not isinstance(atom, compat.Literal))
    known.update(zip(program.jaxpr.jaxpr.invars, spmd.inputs, strict=True))
    return [known.get(var, spmd.stacked) for var in variables]


def in_one_memory(eqn: compat.JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
    """Evaluate an equation where device and host are one: copies between them are nothing, in a loop's body as well."""
    if compat.crosses_memories(eqn):
        return operands
    scan = compat.scan_of(eqn)
    if scan is None or not _copies(scan.body.jaxpr):
        return compat.bind(eqn, operands)
    flat = flatten(scan.body)

    def body(*inputs: Any) -> list[Any]:
        env = {**dict(compat.consts_of(flat)), **dict(zip(flat.jaxpr.invars, inputs, strict=True))}
        for inner in flat.jaxpr.eqns:
            results = in_one_memory(inner, [compat.read(env, atom) for atom in inner.invars])
            env.update(zip(inner.outvars, results, strict=True))
        return [compat.read(env, atom) for atom in flat.jaxpr.outvars]

    return scan.run(body, operands)


def _copies(jaxpr: Any) -> bool:
    """Does anything in it cross memories?"""
    return any(
        compat.crosses_memories(eqn) or any(_copies(inner) for inner in compat.sub_jaxprs(eqn)) for eqn in jaxpr.eqns
    )


def as_array(value: Any, aval: Any) -> jax.Array:
    """A value as an array of this type, weakly typed where the type is."""
    if isinstance(value, jax.Array):
        return value
    array = np.asarray(value, aval.dtype)
    weak = jax.numpy.asarray(array.item()) if aval.weak_type and not array.ndim else None
    return weak if weak is not None and weak.dtype == aval.dtype else jax.numpy.asarray(array)


def _matched(given: list[Any], made: list[Any]) -> tuple[int, ...]:
    """Positions of inputs whose buffer some output of the same type can take over."""
    free = list(made)
    positions = []
    for position, known in enumerate(given):
        if known in free:
            free.remove(known)
            positions.append(position)
    return tuple(positions)


def _ops(segment: Sequence[Action]) -> list[int]:
    return [action.target for action in segment if action.kind is Kind.COMPUTE]
