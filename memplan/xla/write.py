"""A module and a sequence of runs -> the module that carries the sequence out: clones, and another order.

What only names a value is written where it is first read. A clone has the name of its instruction and a number, and
computations of its own: XLA wants one for every fusion, reduction and loop.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from memplan.xla.module import Instruction, Module

VIEWS = frozenset({"bitcast", "get-tuple-element", "tuple", "opt-barrier"})

_NAME = re.compile(r"%([\w.\-]+)")
_FRAME = re.compile(r" ?stack_frame_id=\d+")
_AFTER = re.compile(r", control-predecessors=\{[^}]*\}")
_TABLES = re.compile(r"\n+(?:FileNames|FunctionNames|FileLocations|StackFrames)\n.*", re.DOTALL)


def write(module: Module, sequence: Sequence[str]) -> str:
    """Text of the module whose entry runs its instructions in this order, some of them again.

    Every read is served by the latest run before it. Tables of stack frames are left out: XLA does not read them back.
    """
    return _Writing(module).text(sequence)


class _Writing:
    def __init__(self, module: Module) -> None:
        self._module, self._entry = module, module.entry
        self._lines: list[str] = []
        self._clones: list[str] = []
        self._current: dict[str, str] = {}  # kernels, arguments and constants -> the instruction that serves them now
        self._views: dict[tuple[str, ...], str] = {}
        self._taken = set(module.entry.ops) | set(module)

    def text(self, sequence: Sequence[str]) -> str:
        ops = self._entry.ops
        for op in ops.values():
            if op.opcode in ("parameter", "constant"):
                self._emit(op, op.name, [])
        for name in sequence:
            self._run(ops[name])
        if self._entry.root.opcode in VIEWS:
            self._named(self._entry.root.name)
        first, *_, last = self._entry.text.split("\n")
        entry = "\n".join([first, *self._lines, last])
        bodies = [text for name, text in self._module.texts.items() if name != self._module.entry_name]
        head = _TABLES.sub("", self._module.head)
        return _FRAME.sub("", "\n\n".join([head, *bodies, *self._clones, entry])) + "\n"

    def _run(self, op: Instruction) -> None:
        operands = [self._named(name) for name in op.operands]
        again = op.name in self._current
        self._emit(op, self._fresh(op.name) if again else op.name, operands)

    def _named(self, name: str) -> str:
        """The instruction that gives this value now."""
        op = self._entry.ops[name]
        if op.opcode not in VIEWS:
            return self._current[name]
        operands = [self._named(operand) for operand in op.operands]
        key = (name, *operands)
        if key not in self._views:
            first = all(name != other for other, *_ in self._views)
            self._views[key] = name if first else self._fresh(name)
            self._emit(op, self._views[key], operands)
        return self._views[key]

    def _emit(self, op: Instruction, name: str, operands: Sequence[str]) -> None:
        if op.opcode not in VIEWS:
            self._current[op.name] = name
        self._lines.append(self._line(op, name, operands))

    def _line(self, op: Instruction, name: str, operands: Sequence[str]) -> str:
        line = op.line
        if name != op.name:
            line = _AFTER.sub("", line.replace("ROOT ", "", 1))
            left, right = line.split(" = ", 1)
            for called in dict.fromkeys(op.called):
                right = re.sub(rf"%{re.escape(called)}(?![\w.\-])", f"%{self._cloned(called)}", right)
            line = f"{left.replace(f'%{op.name}', f'%{name}', 1)} = {right}"
        if list(operands) != list(op.operands):
            before, opened, rest = line.partition(f" {op.opcode}(")
            inside, closed, after = rest.partition(")")
            fresh = iter(operands)
            line = before + opened + _NAME.sub(lambda _: f"%{next(fresh)}", inside) + closed + after
        return line

    def _cloned(self, name: str) -> str:
        """A computation like this one, with what it calls."""
        fresh = self._fresh(name)
        text = self._module.texts[name].replace(f"%{name} (", f"%{fresh} (", 1)
        for called in dict.fromkeys(self._called(name)):
            text = re.sub(rf"%{re.escape(called)}(?![\w.\-])", f"%{self._cloned(called)}", text)
        self._clones.append(text)
        return fresh

    def _called(self, name: str) -> Iterator[str]:
        for op in self._module[name].ops.values():
            yield from op.called

    def _fresh(self, name: str) -> str:
        number = 1
        while (fresh := f"{name}.run{number + 1}") in self._taken:
            number += 1
        self._taken.add(fresh)
        return fresh
