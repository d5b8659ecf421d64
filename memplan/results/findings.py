"""What a step could save, counted in its program and its compiled module: no further compilation."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from memplan.compilation.outcome import Outcome
from memplan.compilation.scheduled import ScheduledModule
from memplan.planning.problem import Role
from memplan.program import compat
from memplan.program.constants import captured
from memplan.program.jit_arguments import infer_static
from memplan.program.state.host_state import donation_pairs, positions_of
from memplan.program.trace import Program
from memplan.report.diagnosis import KINDS, Finding, Kind
from memplan.results.memory import Origins, peak_lifetimes
from memplan.xla.buffers import instruction_of
from memplan.xla.sources import constants

# Less is not worth telling, since any change moves XLA's fusions: without its loss, a ResNet-26 takes 0.5 MiB (0.2 %)
# less on an A100, a 3D U-Net 268 bytes.
LEAST_BYTES = 1 << 20
LEAST_SHARE = 0.01  # of the step's bytes
_IN_THE_PROGRAM: Mapping[Kind, str] = {  # constants, which take as much as arguments
    "closed over": "the program holds a copy that is neither donated nor freed",
    "folded": "XLA computed it beforehand, and the program holds it",
}
_WIDE = frozenset({"float64", "int64", "uint64", "complex128"})
# What computes an array of its operands alone: a callback or a receive without operands does not.
_COMPUTES = frozenset({"fusion", "iota", "broadcast", "concatenate", "copy", "pad", "reshape", "scatter", "transpose"})


def is_large(nbytes: int, step_bytes: int) -> bool:
    """Is it worth telling of a step that takes so many bytes?"""
    return nbytes >= max(LEAST_BYTES, LEAST_SHARE * step_bytes)


def counted(found: Outcome) -> tuple[Finding, ...]:
    """Findings about the step before its plan: the cheapest remedies first, of each the one that saves most."""
    step = _Counted(found.program.original, found.planned.plain)
    large = (one for one in step.findings() if is_large(one.gained_bytes, step.plain.device_bytes))
    return tuple(sorted(large, key=lambda one: (KINDS.index(one.kind), -one.gained_bytes)))


@dataclass(frozen=True)
class Argument:
    """A positional argument that is not static."""

    number: int  # as `donate_argnums` counts
    name: str  # as `argument 0 (state)`
    inputs: Sequence[int]  # positions of its leaves among the program's inputs


def arguments_of(program: Program) -> Iterator[Argument]:
    """The arguments, in order."""
    names, count = compat.input_names(program.traced.jaxpr), len(program.traced.arguments)
    static, _ = infer_static(program.step, count, program.options)
    for number in range(count + len(static)):
        if number not in static and (inputs := positions_of(program, number)):
            name = re.match(r"\w+", names[inputs[0]])
            yield Argument(number, f"argument {number}{f' ({name[0]})' if name else ''}", inputs)


def replaced_inputs(program: Program) -> Mapping[int, int]:
    """Output -> the input whose buffer it takes, or could take: of those that are donated, then of all of its type."""
    jaxpr = program.traced.jaxpr.jaxpr
    kept = [position for position, is_kept in enumerate(program.kept(program.traced.jaxpr)) if is_kept]
    found: dict[int, int] = {}
    for donated in (True, False):
        free = [number for number in range(len(jaxpr.outvars)) if number not in found]
        inputs = [position for position in kept if program.donated[position] is donated]
        pairs = donation_pairs(jaxpr.invars, [jaxpr.outvars[number] for number in free], inputs)
        found.update((free[index], position) for index, position in pairs)
    return found


@dataclass(frozen=True)
class _Counted:
    program: Program
    plain: ScheduledModule

    def findings(self) -> Iterator[Finding]:
        yield from self._undonated()
        yield from self._constants()
        yield from self._tables()
        yield from self._outputs()
        yield from self._wide_types()

    def _finding(
        self,
        kind: Kind,
        nbytes: int,
        advice: str,
        added_s: float | None = None,
        source: str = "",
        position: int | None = None,
    ) -> Finding:
        left = self.plain.device_bytes - (nbytes if kind not in _IN_THE_PROGRAM else 0)
        return Finding(kind, advice, nbytes, added_s, left, "counted", source=source, position=position)

    def _undonated(self) -> Iterator[Finding]:
        """Arguments whose buffers outputs could take, if they were donated."""
        taken = {one for one in replaced_inputs(self.program).values() if not self.program.donated[one]}
        for one in arguments_of(self.program):
            nbytes = sum(self.program.input_nbytes[position] for position in taken.intersection(one.inputs))
            advice = f"donate {one.name}, donate_argnums={one.number}: what replaces it then takes its buffers"
            yield self._finding("donate", nbytes, advice, position=one.number)

    def _constants(self) -> Iterator[Finding]:
        """Large constants of the module: arrays that the step captures, and what XLA computed when it compiled."""
        arrays = [value for _, value in captured(self.program.traced.jaxpr) if hasattr(value, "dtype")]
        types = {(str(one.dtype), one.size) for one in arrays}
        found = defaultdict[Kind, list[tuple[int, str, str]]](list)
        for op, source in constants(self.plain.module):
            array = op.result[0]
            kind = "closed over" if (array.numpy_name, array.size) in types else "folded"
            found[kind].append((op.nbytes, array.in_numpy, source))
        for kind, rows in found.items():
            _, largest, source = max(rows)
            which = f"{largest} and {len(rows) - 1} more as arguments" if len(rows) > 1 else f"{largest} as an argument"
            advice = f"pass {which}: {_IN_THE_PROGRAM[kind]}"
            yield self._finding(kind, sum(row[0] for row in rows), advice, 0.0, source)

    def _tables(self) -> Iterator[Finding]:
        """Temporaries of the peak that depend on no argument, such as a mask, or one-hot rows of `jnp.arange`."""
        problem, module, seconds = self.plain.problem, self.plain.module, self.plain.replay.seconds
        origins, fixed = Origins(module), {n for n, one in enumerate(problem.buffers) if one.role is Role.CONSTANT}
        for kernel in problem.kernels:
            op = module.instructions.get(kernel.name)
            if op and op.opcode in _COMPUTES and kernel.block is None and fixed.issuperset(kernel.reads):
                fixed.update(kernel.writes)
        for one in peak_lifetimes(self.plain):
            buffer = problem.buffers[one.buffer]
            name = instruction_of(buffer.name)
            # Without a line it is XLA's own, such as the zeros of an AlexNet's ReLUs; in the place of what does depend
            # on an argument, it is the start of what is updated there.
            if (source := origins.source(name)) and fixed.issuperset(problem.alias_sets[buffer.alias_set]):
                advice = f"broadcast {origins.shape(buffer.name)} where it is read: it depends on no argument"
                yield self._finding("table", one.nbytes, advice, -seconds.get(name, 0.0), source)

    def _outputs(self) -> Iterator[Finding]:
        """Outputs that replace no argument."""
        traced, replaced = self.program.traced.jaxpr, replaced_inputs(self.program)
        makers = {id(var): eqn for eqn in traced.jaxpr.eqns for var in eqn.outvars}
        outputs, results = traced.jaxpr.outvars, self.plain.module.entry.root.result
        results = results[len(results) - len(outputs) :]  # tokens of effects come first
        named = zip(compat.output_names(traced), outputs, results, strict=True)
        for number, (name, atom, array) in enumerate(named):
            if number in replaced or array.on_host:
                continue
            source = compat.relative(compat.source_of(makers[id(atom)])) if id(atom) in makers else ""
            advice = f"return what you read of {name}, {array.in_numpy}, such as its mean, instead of all of it"
            yield self._finding("output", array.nbytes, advice, source=source, position=number)

    def _wide_types(self) -> Iterator[Finding]:
        """Half of what arguments, outputs and the temporaries of the peak have in 64 bits."""
        buffers, origins = self.plain.problem.buffers, Origins(self.plain.module)
        live = {one.buffer for one in peak_lifetimes(self.plain)}
        held = {  # by place: an output may be in that of an argument
            one.alias_set: one
            for number, one in enumerate(buffers)
            if number in live or one.role in (Role.ARGUMENT, Role.OUTPUT)
        }
        arrays = ((one, origins.array(one.name)) for one in held.values())
        wide = [one for one, array in arrays if array is not None and array.numpy_name in _WIDE]
        if wide:
            largest = sorted(wide, key=lambda one: -one.nbytes)
            source = next(filter(None, (origins.source(instruction_of(one.name)) for one in largest)), "")
            advice = "turn jax_enable_x64 off, or give these arrays types of 32 bits"
            yield self._finding("x64", sum(one.nbytes for one in wide) // 2, advice, source=source)
