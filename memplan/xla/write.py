"""A module and a schedule -> the module that carries it out: clones, host copies, another order.

Instructions that only name a value are written where it is first read. A clone has the name of its
instruction and a number, and computations of its own: XLA wants one for every fusion, reduction and
loop. A copy is a `copy-start` and a `copy-done`; host memory is a memory space of the layout. XLA
moves, merges and deletes nothing after this: the order needs no control dependences.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memplan.planning.problem import Problem
from memplan.planning.schedule import Action, Kind, Schedule, runs
from memplan.xla.buffers import instruction_of, leaf_of
from memplan.xla.edit import Edit, copy_done, copy_start, tuple_element, tuple_of
from memplan.xla.host_copies import IN_STREAM, OUT_STREAM
from memplan.xla.module import Computation, Instruction, Module, with_blocks
from memplan.xla.rewrites.fusion import NAMING
from memplan.xla.shapes import Array, Shape

Value = str | tuple["Value", ...]  # the instruction that gives it, or those that give its parts

# A body begins with instructions of these opcodes.
_OPERANDS = ("parameter", "constant")
# Clones of these opcodes call nothing.
_NAMING = NAMING | {"tuple", "opt-barrier", "add-dependency", "after-all"}
_STREAM = {Kind.OFFLOAD: OUT_STREAM, Kind.PREFETCH: IN_STREAM}
# The name of a clone or a copy ends in a point, one of these and a number.
_MARKS = ("run", "offload", "offloaded", "prefetch", "prefetched")


def original(name: str) -> str:
    """The original instruction of a clone or a copy; else itself."""
    base, _, suffix = name.rpartition(".")
    mark = suffix.rstrip("0123456789")
    return base if base and mark in _MARKS and mark != suffix else name


@dataclass(frozen=True, slots=True)
class _BodyStep:
    """An action on an instruction."""

    kind: Kind
    name: str
    index: int | None = None  # of a copy: the element of the tuple; None if the result is one array


def write(module: Module, problem: Problem, schedule: Schedule) -> Module:
    """The module that does what the schedule says, in the entry and in the bodies of loops.

    Every read is served by the latest run or copy before it. An asynchronous pair runs again as a
    whole. Bodies begin with their parameters: a kernel that comes first in a branch would need
    memory beside the results of the branch before it, which live until the next instruction
    (`HloLiveRange`).

    Args:
      problem: the module's, by `problem_of`.

    Raises:
      ValueError: a copy of what a loop carries or a fixed kernel makes, or one outside of the loop
      that makes it.
    """
    bodies: dict[str, Computation] = {}
    for body in with_blocks(module, module.entry):
        bodies.update(dict.fromkeys(body.ops, body))
    plain_steps = _steps_by_body(bodies, problem, runs(range(len(problem.kernels))))
    planned_steps = _steps_by_body(bodies, problem, schedule)
    edit = Edit(module)
    for name in module:
        steps = planned_steps.get(name, [])
        if steps != plain_steps.get(name, []) or (steps and _begins_late(module, module[name])):
            writer = _BodyWriter(edit, module[name])
            edit.replace(writer.body(steps), writer.clones)
    return edit.module


def _begins_late(module: Module, body: Computation) -> bool:
    """Does a kernel come before a parameter of a body?"""
    if body is module.entry:
        return False
    opcodes = [op.opcode for op in body.ops.values()]
    first = next((n for n, opcode in enumerate(opcodes) if opcode not in _OPERANDS), len(opcodes))
    return "parameter" in opcodes[first:]


def _steps_by_body(
    bodies: Mapping[str, Computation], problem: Problem, schedule: Schedule
) -> Mapping[str, list[_BodyStep]]:
    """Steps by the names of computations.

    Args:
      bodies: instruction -> its computation.
    """
    block: int | None = None
    steps = defaultdict[str, list[_BodyStep]](list)
    for action in schedule:
        if action.kind is Kind.RUN:
            kernel = problem.kernels[action.number]
            block = kernel.block
            step = _BodyStep(Kind.RUN, kernel.name)
        else:
            step = _copy_step(bodies, problem, action, block)
        if step.name in bodies:  # a loop's beginning and end are no instructions
            steps[bodies[step.name].name].append(step)
    return steps


def _copy_step(
    bodies: Mapping[str, Computation],
    problem: Problem,
    action: Action,
    block: int | None,
) -> _BodyStep:
    """The step of a copy, in the block of the kernel before it."""
    buffer = problem.buffers[action.number]
    name = instruction_of(buffer.name)
    if ":" in buffer.name or name not in bodies:
        reason = "is a loop carry, or is made in a computation that is not planned"
        raise ValueError(f"{buffer.name} {reason}")
    if block != (None if buffer.maker is None else problem.kernels[buffer.maker].block):
        raise ValueError(f"{buffer.name} is copied outside of the loop that makes it")
    op = bodies[name].ops[name]
    if op.opcode.endswith("-start"):  # its results exist when it is done
        op = _end(bodies[name], op)
    index = None if isinstance(op.shape, Array) else leaf_of(buffer.name)
    return _BodyStep(action.kind, op.name, index)


class _BodyWriter:
    """Writes one computation.

    Attributes:
      clones: new computations that it calls.
    """

    def __init__(self, edit: Edit, body: Computation) -> None:
        self._edit = edit
        self._body = body
        self.clones: list[Computation] = []
        self._ops: dict[str, Instruction] = {}  # written ones, in order
        # kernel, argument or constant -> the instruction that gives its latest value
        self._latest: dict[str, str] = {}
        # instruction -> elements of its tuple that were prefetched, by index
        self._prefetched: dict[str, dict[int, str]] = defaultdict(dict)
        self._views: dict[tuple[str, ...], str] = {}
        self._on_host: dict[tuple[str, int | None], str] = {}
        self._started: dict[tuple[Kind, str, int | None], deque[str]] = defaultdict(deque)
        self._planned: set[str] = set()  # what runs in a step of its own

    def body(self, steps: Sequence[_BodyStep]) -> Computation:
        for op in self._body.ops.values():
            if op.opcode in _OPERANDS:
                self._latest[op.name] = self._emit(op, op.name, [])
        self._planned.update(step.name for step in steps if step.kind is Kind.RUN)
        for step in steps:
            self._write(step, self._body.ops[step.name])
        root = self._name_of(self._body.root)
        self._ops[root] = self._ops[root].changed(root=True)
        return self._body.with_ops(self._ops.values())

    def _write(self, step: _BodyStep, op: Instruction) -> None:
        if step.kind is Kind.RUN:
            is_clone = op.name in self._latest
            self._run(op)
            if op.opcode.endswith("-start"):
                end = _end(self._body, op)
                if is_clone or end.name not in self._planned:
                    self._run(end)
        elif step.kind in (Kind.OFFLOAD, Kind.PREFETCH):
            self._start_copy(step, op)
        else:
            self._end_copy(step, op)

    def _run(self, op: Instruction) -> None:
        operands = [self._name_of(self._body.ops[name]) for name in op.operands]
        name = self._edit.fresh(op.name, "run", 2) if op.name in self._latest else op.name
        self._latest[op.name] = self._emit(op, name, operands)

    def _start_copy(self, step: _BodyStep, op: Instruction) -> None:
        array = _array(op, step.index)
        target = array.in_host_memory
        source = array
        if step.kind is Kind.PREFETCH:
            target = array
            source = array.in_host_memory
            operand = self._on_host[op.name, step.index]
        elif step.index is None:
            operand = self._latest[op.name]
        else:
            operand = self._element(self._latest[op.name], step.index, array)
        name = self._edit.fresh(op.name, step.kind.value)
        self._ops[name] = copy_start(name, target, source, operand, _STREAM[step.kind])
        self._started[step.kind, op.name, step.index].append(name)

    def _end_copy(self, step: _BodyStep, op: Instruction) -> None:
        array = _array(op, step.index)
        is_prefetch = step.kind is Kind.PREFETCHED
        start_kind = Kind.PREFETCH if is_prefetch else Kind.OFFLOAD
        start = self._started[start_kind, op.name, step.index].popleft()
        name = self._edit.fresh(op.name, step.kind.value)
        self._ops[name] = copy_done(name, array if is_prefetch else array.in_host_memory, start)
        if not is_prefetch:
            self._on_host[op.name, step.index] = name
        elif step.index is None:
            self._latest[op.name] = name
        else:
            self._prefetched[self._latest[op.name]][step.index] = name

    def _value(self, op: Instruction) -> Value:
        """The instructions that give the latest value of an instruction, behind tuples."""
        operands = [self._body.ops[name] for name in op.operands]
        match op.opcode:
            case "opt-barrier" | "add-dependency":
                return self._value(operands[0])
            case "tuple":
                return tuple(map(self._value, operands))
            case "get-tuple-element":
                source = operands[0]
                while source.opcode in ("opt-barrier", "add-dependency"):
                    source = self._body.ops[source.operands[0]]
                if source.opcode == "tuple":  # its other parts may not be computed yet
                    return self._value(self._body.ops[source.operands[op.index]])
                value = self._value(source)
                if isinstance(value, tuple):
                    return value[op.index]
                return self._element(value, op.index, op.shape, op)
            case "bitcast" | "after-all":
                return self._view(op, list(map(self._name_of, operands)))
        return self._latest[op.name]

    def _element(self, value: str, index: int, shape: Shape, op: Instruction | None = None) -> str:
        """An element of a kernel's tuple, or the copy that was prefetched."""
        if value in self._prefetched and index in self._prefetched[value]:
            return self._prefetched[value][index]
        key = (value, str(index))
        if key not in self._views:
            if op is None or op.name in self._ops:
                name = self._edit.fresh(value, f"{index}.")
                self._ops[name] = tuple_element(name, shape, value, index)
            else:
                name = self._emit(op, op.name, [value])
            self._views[key] = name
        return self._views[key]

    def _view(self, op: Instruction, operands: Sequence[str]) -> str:
        key = (op.name, *operands)
        if key not in self._views:
            name = self._edit.fresh(op.name, "run", 2) if op.name in self._ops else op.name
            self._views[key] = self._emit(op, name, operands)
        return self._views[key]

    def _name_of(self, op: Instruction) -> str:
        """An instruction that gives the latest value of an instruction."""
        return self._as_tuple(self._value(op), op.shape, op)

    def _as_tuple(self, value: Value, shape: Shape, op: Instruction | None = None) -> str:
        """A tuple of a value's parts, unless an instruction gives the whole value."""
        if isinstance(value, str) and value in self._prefetched:
            assert isinstance(shape, tuple)
            value = tuple(self._element(value, index, part) for index, part in enumerate(shape))
        if isinstance(value, str):
            return value
        assert isinstance(shape, tuple)
        parts = [self._as_tuple(*pair) for pair in zip(value, shape, strict=True)]
        key = ("tuple", *parts)
        if key not in self._views:
            is_first = op is not None and op.opcode == "tuple" and op.name not in self._ops
            name = op.name if op is not None and is_first else self._edit.fresh("tuple", "run", 2)
            self._ops[name] = tuple_of(name, shape, parts)
            self._views[key] = name
        return self._views[key]

    def _emit(self, op: Instruction, name: str, operands: Sequence[str]) -> str:
        """Write an instruction under this name and with these operands."""
        called: dict[str, str] = {}
        if name != op.name and op.opcode not in _NAMING:
            for callee in dict.fromkeys(op.called):
                clones = self._edit.clone(callee, "run", 2)
                self.clones += clones
                called[callee] = clones[-1].name
        self._ops[name] = op.changed(
            name=name,
            operands=operands,
            root=False,
            called=called,
            ordered=False,
        )
        return name


def _end(body: Computation, start: Instruction) -> Instruction:
    """The end of an asynchronous pair."""
    return next(user for user, _ in body.uses[start.name] if user.opcode.endswith("-done"))


def _array(op: Instruction, index: int | None) -> Array:
    part = op.shape if index is None or isinstance(op.shape, Array) else op.shape[index]
    assert isinstance(part, Array)
    return part
