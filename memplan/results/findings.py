"""Counts what a step could save in its program and compiled module, without another compilation."""

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

# Smaller savings are not listed, since any change moves XLA's fusions: without its loss, a
# ResNet-26 takes 0.5 MiB (0.2 %) less on an A100, a 3D U-Net 268 bytes.
MIN_BYTES = 1 << 20
MIN_SHARE = 0.01  # of the step's bytes
_IN_THE_PROGRAM: Mapping[Kind, str] = {  # constants
    "closed over": "the program holds a copy that is neither donated nor freed",
    "folded": "XLA computed it beforehand, and the program holds it",
}
_WIDE = frozenset({"float64", "int64", "uint64", "complex128"})
# Opcodes whose results depend on nothing but their operands, unlike a callback or a receive.
_PURE = frozenset(
    {"fusion", "iota", "broadcast", "concatenate", "copy", "pad", "reshape", "scatter", "transpose"}
)


def is_large(nbytes: int, step_bytes: int) -> bool:
    """Is a saving worth listing for a step of so many bytes?"""
    return nbytes >= max(MIN_BYTES, MIN_SHARE * step_bytes)


def counted(outcome: Outcome) -> tuple[Finding, ...]:
    """Findings about the unplanned step: the cheapest remedies first, then the largest savings."""
    step = _Counted(outcome.program.original, outcome.planned.plain)
    step_bytes = step.plain.device_bytes
    large = [finding for finding in step.findings() if is_large(finding.gained_bytes, step_bytes)]
    return tuple(
        sorted(large, key=lambda finding: (KINDS.index(finding.kind), -finding.gained_bytes))
    )


@dataclass(frozen=True)
class Argument:
    """A positional argument that is not static."""

    number: int  # as `donate_argnums` counts
    name: str  # as `argument 0 (state)`
    inputs: Sequence[int]  # positions of its leaves among the program's inputs


def arguments_of(program: Program) -> Iterator[Argument]:
    """The arguments, in order."""
    names = compat.input_names(program.traced.jaxpr)
    count = len(program.traced.arguments)
    static, _ = infer_static(program.step, count, program.options)
    for number in range(count + len(static)):
        if number not in static and (inputs := positions_of(program, number)):
            match = re.match(r"\w+", names[inputs[0]])
            name = f"argument {number} ({match[0]})" if match else f"argument {number}"
            yield Argument(number, name, inputs)


def replaced_inputs(program: Program) -> Mapping[int, int]:
    """Output -> the input of its type whose buffer it takes or could take, donated ones first."""
    jaxpr = program.traced.jaxpr.jaxpr
    read_inputs = [
        position for position, is_kept in enumerate(program.kept(program.traced.jaxpr)) if is_kept
    ]
    replaced: dict[int, int] = {}
    for donated in (True, False):
        new_outputs = [number for number in range(len(jaxpr.outvars)) if number not in replaced]
        inputs = [position for position in read_inputs if program.donated[position] is donated]
        pairs = donation_pairs(
            jaxpr.invars, [jaxpr.outvars[number] for number in new_outputs], inputs
        )
        replaced.update((new_outputs[index], position) for index, position in pairs)
    return replaced


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
        # An argument takes as many bytes as the constant that it replaces.
        saved = 0 if kind in _IN_THE_PROGRAM else nbytes
        return Finding(
            kind=kind,
            advice=advice,
            gained_bytes=nbytes,
            added_s=added_s,
            device_bytes=self.plain.device_bytes - saved,
            measured="counted",
            source=source,
            position=position,
        )

    def _undonated(self) -> Iterator[Finding]:
        """Arguments whose buffers outputs could take, if they were donated."""
        program = self.program
        replaced = replaced_inputs(program).values()
        undonated = {position for position in replaced if not program.donated[position]}
        for argument in arguments_of(program):
            positions = undonated.intersection(argument.inputs)
            nbytes = sum(program.input_nbytes[position] for position in positions)
            advice = (
                f"donate {argument.name}, donate_argnums={argument.number}: what replaces it then "
                "takes its buffers"
            )
            yield self._finding("donate", nbytes, advice, position=argument.number)

    def _constants(self) -> Iterator[Finding]:
        """Large constants: arrays that the step captures, or that XLA computed at compile time."""
        values = [value for _, value in captured(self.program.traced.jaxpr)]
        types = {(str(value.dtype), value.size) for value in values if hasattr(value, "dtype")}
        by_kind = defaultdict[Kind, list[tuple[int, str, str]]](list)
        for op, source in constants(self.plain.module):
            array = op.result[0]
            kind = "closed over" if (array.numpy_name, array.size) in types else "folded"
            by_kind[kind].append((op.nbytes, array.in_numpy, source))
        for kind, rows in by_kind.items():
            _, largest, source = max(rows)
            arrays = f"{largest} as an argument"
            if len(rows) > 1:
                arrays = f"{largest} and {len(rows) - 1} more as arguments"
            advice = f"pass {arrays}: {_IN_THE_PROGRAM[kind]}"
            yield self._finding(kind, sum(nbytes for nbytes, _, _ in rows), advice, 0.0, source)

    def _tables(self) -> Iterator[Finding]:
        """Temporaries at the peak that depend on no argument: masks, rows of `jnp.arange`."""
        problem = self.plain.problem
        module = self.plain.module
        seconds = self.plain.replay.seconds
        origins = Origins(module)
        buffers = enumerate(problem.buffers)
        fixed = {number for number, buffer in buffers if buffer.role is Role.CONSTANT}
        for kernel in problem.kernels:
            op = module.instructions.get(kernel.name)
            if (
                op
                and op.opcode in _PURE
                and kernel.block is None
                and fixed.issuperset(kernel.reads)
            ):
                fixed.update(kernel.writes)
        for lifetime in peak_lifetimes(self.plain):
            buffer = problem.buffers[lifetime.buffer]
            name = instruction_of(buffer.name)
            source = origins.source(name)
            # A buffer without a line is XLA's own, such as the zeros of an AlexNet's ReLUs. One
            # that shares its memory with a buffer that depends on an argument is only the initial
            # value of an update.
            if source and fixed.issuperset(problem.alias_sets[buffer.alias_set]):
                array = origins.shape(buffer.name)
                advice = f"broadcast {array} where it is read: it depends on no argument"
                yield self._finding(
                    "table", lifetime.nbytes, advice, -seconds.get(name, 0.0), source
                )

    def _outputs(self) -> Iterator[Finding]:
        """Outputs that replace no argument."""
        traced = self.program.traced.jaxpr
        replaced = replaced_inputs(self.program)
        makers = {id(var): eqn for eqn in traced.jaxpr.eqns for var in eqn.outvars}
        outputs = traced.jaxpr.outvars
        results = self.plain.module.entry.root.result
        results = results[len(results) - len(outputs) :]  # tokens of effects come first
        named = zip(compat.output_names(traced), outputs, results, strict=True)
        for number, (name, atom, array) in enumerate(named):
            if number in replaced or array.on_host:
                continue
            maker = makers.get(id(atom))
            source = compat.relative(compat.source_of(maker)) if maker is not None else ""
            advice = (
                f"return what you read of {name}, {array.in_numpy}, such as its mean, instead of "
                "all of it"
            )
            yield self._finding("output", array.nbytes, advice, source=source, position=number)

    def _wide_types(self) -> Iterator[Finding]:
        """Half the bytes of arguments, outputs and temporaries at the peak that have 64 bits."""
        buffers = self.plain.problem.buffers
        origins = Origins(self.plain.module)
        live = {lifetime.buffer for lifetime in peak_lifetimes(self.plain)}
        by_place = {  # an output may alias an argument
            buffer.alias_set: buffer
            for number, buffer in enumerate(buffers)
            if number in live or buffer.role in (Role.ARGUMENT, Role.OUTPUT)
        }
        arrays = ((buffer, origins.array(buffer.name)) for buffer in by_place.values())
        wide = [
            buffer for buffer, array in arrays if array is not None and array.numpy_name in _WIDE
        ]
        if wide:
            largest = sorted(wide, key=lambda buffer: -buffer.nbytes)
            sources = (origins.source(instruction_of(buffer.name)) for buffer in largest)
            advice = "turn jax_enable_x64 off, or give these arrays types of 32 bits"
            nbytes = sum(buffer.nbytes for buffer in wide)
            source = next(filter(None, sources), "")
            yield self._finding("x64", nbytes // 2, advice, source=source)
