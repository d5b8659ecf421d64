"""A module and a schedule -> the module that carries it out: clones, copies to the host and back, another order.

Instructions that only name a value are written where it is first read. A clone has the name of its instruction and a
number, and computations of its own: XLA wants one for every fusion, reduction and loop. A copy is a `copy-start` and a
`copy-done`; host memory is a memory space of the layout. XLA moves, merges and deletes nothing after this: the order
needs no control dependences.
"""

import re
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memplan.planning.problem import Problem
from memplan.planning.schedule import Kind, Schedule, runs
from memplan.xla.async_pairs import IN_STREAM, OUT_STREAM
from memplan.xla.buffers import instruction_of, leaf_of
from memplan.xla.frames import readable
from memplan.xla.module import Computation, Instruction, Module, Names, with_blocks
from memplan.xla.rewrites.fusion import AFTER, tuple_element
from memplan.xla.shapes import HOST_SPACE, Array, Shape, shape_text

Value = str | tuple["Value", ...]  # the instruction that gives it, or those that give its parts

_NAMING = frozenset({"bitcast", "get-tuple-element", "tuple", "opt-barrier", "add-dependency", "after-all"})
_SPACE = re.compile(r"S\(\d+\)")
_STREAM = {Kind.OFFLOAD: OUT_STREAM, Kind.PREFETCH: IN_STREAM}
_WRITTEN = re.compile(r"\.(?:run|offload|offloaded|prefetch|prefetched)\d+$")


def original(name: str) -> str:
    """The instruction that an instruction of a written module repeats or copies; its own name where it does neither."""
    return _WRITTEN.sub("", name)


@dataclass(frozen=True, slots=True)
class _Step:
    """An action on an instruction; of a copy, on an element of its tuple, None where it makes one array."""

    kind: Kind
    name: str
    index: int | None = None


def write(module: Module, problem: Problem, schedule: Schedule) -> str:
    """Text of the module that does what the schedule says, in the entry and in the bodies of loops.

    Every read is served by the latest run or copy before it. An asynchronous pair runs again as a whole. Tables of
    stack frames are left out: XLA does not read them back.

    Args:
      problem: the module's, by `problem_of`.

    Raises:
      ValueError: a copy of what a loop carries or a fixed kernel makes, or one outside of the loop that makes it.
    """
    home = {op.name: body for body in with_blocks(module, module.entry) for op in body.ops.values()}
    names, texts = Names(module), list[str]()
    plain = _steps_by_body(home, problem, runs(range(len(problem.kernels))))
    planned = _steps_by_body(home, problem, schedule)
    for name, text in module.texts.items():
        if planned[name] == plain[name]:
            texts.append(text)
        else:
            body = _BodyWriter(module, names, module[name])
            text = body.text(planned[name])
            texts += [*body.clones, text]
    return readable(module.head, texts)


def as_it_stands(module: Module) -> str:
    """Text of a module that XLA reads back."""
    return readable(module.head, module.texts.values())


def _steps_by_body(home: Mapping[str, Computation], problem: Problem, schedule: Schedule) -> Mapping[str, list[_Step]]:
    """Steps by the names of computations."""
    kernels, block, found = problem.kernels, None, defaultdict[str, list[_Step]](list)
    for action in schedule:
        if action.kind is Kind.RUN:
            block, step = kernels[action.number].block, _Step(Kind.RUN, kernels[action.number].name)
        else:
            buffer = problem.buffers[action.number]
            name = instruction_of(buffer.name)
            if ":" in buffer.name or name not in home:
                raise ValueError(f"{buffer.name} is a loop carry, or is made in a computation that is not planned")
            if block != (None if buffer.maker is None else kernels[buffer.maker].block):
                raise ValueError(f"{buffer.name} is copied outside of the loop that makes it")
            op = home[name].ops[name]
            if op.opcode.endswith("-start"):  # its results are there when it is done
                op = _end(home[name], op)
            step = _Step(action.kind, op.name, None if isinstance(op.shape, Array) else leaf_of(buffer.name))
        if step.name in home:  # a loop's beginning and end are no instructions
            found[home[step.name].name].append(step)
    return found


class _BodyWriter:
    """Writes one computation."""

    def __init__(self, module: Module, names: Names, body: Computation) -> None:
        self._module, self._fresh, self._body = module, names.fresh, body
        self.clones: list[str] = []
        self._lines: dict[str, str] = {}
        self._now: dict[str, str] = {}  # kernels, arguments, constants -> the instruction that gives them now
        self._back: dict[str, dict[int, str]] = defaultdict(dict)  # elements that were brought back from the host
        self._views: dict[tuple[str, ...], str] = {}
        self._on_host: dict[tuple[str, int | None], str] = {}
        self._under_way: dict[tuple[Kind, str, int | None], deque[str]] = defaultdict(deque)
        self._planned: set[str] = set()  # what runs in a step of its own

    def text(self, steps: Sequence[_Step]) -> str:
        for op in self._body.ops.values():
            if op.opcode in ("parameter", "constant"):
                self._now[op.name] = self._emit(op, op.name, [])
        self._planned.update(step.name for step in steps if step.kind is Kind.RUN)
        for step in steps:
            self._write(step, self._body.ops[step.name])
        root = self._name_of(self._body.root)
        self._lines[root] = self._lines[root].replace("  %", "  ROOT %", 1)
        return self._body.text_with(self._lines.values())

    def _write(self, step: _Step, op: Instruction) -> None:
        if step.kind is Kind.RUN:
            again = op.name in self._now
            self._run(op)
            if op.opcode.endswith("-start") and (again or _end(self._body, op).name not in self._planned):
                self._run(_end(self._body, op))
        elif step.kind in (Kind.OFFLOAD, Kind.PREFETCH):
            self._begin(step, op)
        else:
            self._end(step, op)

    def _run(self, op: Instruction) -> None:
        operands = [self._name_of(self._body.ops[name]) for name in op.operands]
        name = self._fresh(op.name, "run", 2) if op.name in self._now else op.name
        self._now[op.name] = self._emit(op, name, operands)

    def _begin(self, step: _Step, op: Instruction) -> None:
        array = _array(op, step.index)
        away, here = str(_on_host(array)), str(array)
        if step.kind is Kind.PREFETCH:
            source, away, here = self._on_host[op.name, step.index], here, away
        else:
            source = self._now[op.name]
            source = source if step.index is None else self._element(source, step.index, array)
        name = self._fresh(op.name, step.kind.value)
        self._lines[name] = f"  %{name} = ({away}, {here}, u32[]) copy-start(%{source}), {_STREAM[step.kind]}"
        self._under_way[step.kind, op.name, step.index].append(name)

    def _end(self, step: _Step, op: Instruction) -> None:
        array, home = _array(op, step.index), step.kind is Kind.PREFETCHED
        begun = Kind.PREFETCH if home else Kind.OFFLOAD
        start = self._under_way[begun, op.name, step.index].popleft()
        name = self._fresh(op.name, step.kind.value)
        self._lines[name] = f"  %{name} = {array if home else _on_host(array)} copy-done(%{start})"
        if not home:
            self._on_host[op.name, step.index] = name
        elif step.index is None:
            self._now[op.name] = name
        else:
            self._back[self._now[op.name]][step.index] = name

    def _value(self, op: Instruction) -> Value:
        """The instructions that give the value of this one now; tuples are looked through."""
        operands = (self._body.ops[name] for name in op.operands)
        match op.opcode:
            case "opt-barrier" | "add-dependency":
                return self._value(next(operands))
            case "tuple":
                return tuple(map(self._value, operands))
            case "get-tuple-element":
                source = next(operands)
                while source.opcode in ("opt-barrier", "add-dependency"):
                    source = self._body.ops[source.operands[0]]
                if source.opcode == "tuple":  # put together here: its other parts may not be made yet
                    return self._value(self._body.ops[source.operands[op.index]])
                value = self._value(source)
                return value[op.index] if isinstance(value, tuple) else self._element(value, op.index, op.shape, op)
            case "bitcast" | "after-all":
                return self._view(op, list(map(self._name_of, operands)))
        return self._now[op.name]

    def _element(self, value: str, index: int, shape: Shape, op: Instruction | None = None) -> str:
        """An element of a kernel's tuple, or the copy that was prefetched."""
        if value in self._back and index in self._back[value]:
            return self._back[value][index]
        key = (value, str(index))
        if key not in self._views:
            if op is None or op.name in self._lines:
                name = self._fresh(value, f"{index}.")
                self._lines[name] = tuple_element(name, shape, value, index).line
            else:
                name = self._emit(op, op.name, [value])
            self._views[key] = name
        return self._views[key]

    def _view(self, op: Instruction, operands: Sequence[str]) -> str:
        key = (op.name, *operands)
        if key not in self._views:
            name = self._fresh(op.name, "run", 2) if op.name in self._lines else op.name
            self._views[key] = self._emit(op, name, operands)
        return self._views[key]

    def _name_of(self, op: Instruction) -> str:
        """One instruction that gives the value of this one."""
        return self._as_tuple(self._value(op), op.shape, op)

    def _as_tuple(self, value: Value, shape: Shape, op: Instruction | None = None) -> str:
        """A tuple of the parts, where they are no tuple yet."""
        if isinstance(value, str) and value in self._back:
            assert isinstance(shape, tuple)
            value = tuple(self._element(value, index, part) for index, part in enumerate(shape))
        if isinstance(value, str):
            return value
        assert isinstance(shape, tuple)
        parts = [self._as_tuple(*both) for both in zip(value, shape, strict=True)]
        key = ("tuple", *parts)
        if key not in self._views:
            first = op is not None and op.opcode == "tuple" and op.name not in self._lines
            name = op.name if op is not None and first else self._fresh("tuple", "run", 2)
            operands = ", ".join(f"%{part}" for part in parts)
            self._lines[name] = f"  %{name} = {shape_text(shape)} tuple({operands})"
            self._views[key] = name
        return self._views[key]

    def _emit(self, op: Instruction, name: str, operands: Sequence[str]) -> str:
        """A line for the instruction, under this name and with these operands."""
        line = AFTER.sub("", op.line_with(name, operands))
        line = line.replace("ROOT ", "", 1) if op.root else line
        if name != op.name and op.opcode not in _NAMING:
            left, right = line.split(" = ", 1)
            for called in dict.fromkeys(op.called):
                right = _rename(right, called, self._clone_body(called))
            line = f"{left} = {right}"
        self._lines[name] = line
        return name

    def _clone_body(self, name: str) -> str:
        """A computation like this one, with what it calls."""
        fresh, module = self._fresh(name, "run", 2), self._module
        text = module.texts[name].replace(f"%{name} (", f"%{fresh} (", 1)
        for called in dict.fromkeys(one for op in module[name].ops.values() for one in op.called):
            text = _rename(text, called, self._clone_body(called))
        self.clones.append(text)
        return fresh


def _end(body: Computation, start: Instruction) -> Instruction:
    """The end of an asynchronous pair."""
    return next(user for user, _ in body.uses[start.name] if user.opcode.endswith("-done"))


def _array(op: Instruction, index: int | None) -> Array:
    part = op.shape if index is None or isinstance(op.shape, Array) else op.shape[index]
    assert isinstance(part, Array)
    return part


def _rename(text: str, old: str, new: str) -> str:
    return re.sub(rf"%{re.escape(old)}(?![\w.\-])", f"%{new}", text)


def _on_host(array: Array) -> Array:
    """The array in the host's memory; tiles and the width of elements come before the space (`Layout::ToString`)."""
    space = f"S({HOST_SPACE})"
    order, _, rest = array.layout.strip("{}").partition(":")
    rest = _SPACE.sub(space, rest) if _SPACE.search(rest) else rest + space
    return Array(array.dtype, array.dims, f"{{{order}:{rest}}}")
