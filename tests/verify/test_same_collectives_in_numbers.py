"""What the judge of shaped collectives accepts computes the same numbers: random mutants, run on all devices."""

from __future__ import annotations

import random
import re
from collections import Counter

import numpy as np
import pytest

from memplan.verify.dataflow import NotThePlainModuleError
from memplan.verify.same_collectives import judge_shaped
from memplan.xla.module import Computation, Instruction
from memplan.xla.shapes import Array
from tests.hlo import read_module
from tests.verify.collective_texts import Case
from tests.verify.test_same_collectives import ACCEPTED

Values = np.ndarray | list[np.ndarray]  # [partitions, *dims], or several
_GROUPS = re.compile(r"replica_groups=\{\{[\d,{}]*\}\}")
_ELEMENTWISE = {
    "tanh": lambda x: 3 * x + 1,
    "negate": np.negative,
    "add": np.add,
    "opt-barrier": np.array,
}


class NotRunError(Exception):
    """A module that no device could run."""


class Devices:
    """Runs a module without loops on all partitions at once, in whole numbers."""

    def __init__(self, body: Computation, partitions: int) -> None:
        self.body, self.partitions = body, partitions
        self.known: dict[str, Values] = {}

    def results(self) -> list[np.ndarray]:
        for op in self.body.ops.values():
            self.known[op.name] = result = self._value(
                op, [self.known[name] for name in op.operands]
            )
            for values, shape in zip(
                result if isinstance(result, list) else [result], op.result, strict=True
            ):
                if values.shape[1:] != shape.dims:
                    raise NotRunError(op.name)
        root_value = self.known[self.body.root.name]
        return root_value if isinstance(root_value, list) else [root_value]

    def _value(self, op: Instruction, operands: list) -> Values:
        kind, n = op.opcode, self.partitions
        if kind in _ELEMENTWISE:
            return _ELEMENTWISE[kind](*operands)
        if kind == "tuple":
            return operands
        if kind == "get-tuple-element":
            return operands[0][op.index]
        shape = op.shape
        if kind == "parameter":
            return np.random.default_rng(op.parameter_number).integers(
                0, 1 << 30, (n, *op.result[0].dims)
            )
        if kind == "constant":
            # of floats only zeros are padded with
            elements = op.integers or (0,) * op.result[0].size
            return np.broadcast_to(
                np.array(elements).reshape(op.result[0].dims), (n, *op.result[0].dims)
            )
        if kind in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all"):
            return self._collective(op, operands)
        assert isinstance(shape, Array)
        if kind in ("reshape", "convert"):
            return (
                operands[0].reshape(n, *shape.dims)
                if operands[0].size == n * shape.size
                else self._stop(op)
            )
        if kind == "transpose":
            return operands[0].transpose(0, *(1 + dim for dim in op.dimensions))
        if kind == "concatenate":
            return np.concatenate(operands, axis=1 + op.dimensions[0])
        if kind == "pad":
            return np.pad(operands[0], ((0, 0), *((low, high) for low, high, _ in op.padding)))
        if kind == "slice":
            return operands[0][(slice(None), *(slice(*bounds) for bounds in op.slices))]
        if kind == "dynamic-slice":
            return self._dynamic_slice(operands, shape.dims)
        if kind == "partition-id":
            return np.arange(n)
        if kind in ("clamp", "multiply"):
            return (
                np.clip(operands[1], operands[0], operands[2])
                if kind == "clamp"
                else operands[0] * operands[1]
            )
        raise NotRunError(op.name)

    def _stop(self, op: Instruction) -> np.ndarray:
        raise NotRunError(op.name)

    def _dynamic_slice(self, operands: list[np.ndarray], dims: tuple[int, ...]) -> np.ndarray:
        pieces: list[np.ndarray] = []
        for device in range(self.partitions):
            source = operands[0][device]
            starts = [
                min(max(int(at[device]), 0), whole - size)
                for at, whole, size in zip(operands[1:], source.shape, dims, strict=True)
            ]
            pieces.append(
                source[tuple(slice(at, at + size) for at, size in zip(starts, dims, strict=True))]
            )
        return np.stack(pieces)

    def _collective(self, op: Instruction, operands: list[np.ndarray]) -> Values:
        groups = op.groups(self.partitions)
        if sorted(member for group in groups for member in group) != list(range(self.partitions)):
            raise NotRunError(op.name)
        outputs = [[np.zeros(0)] * self.partitions for _ in op.result]
        for group in groups:
            for place, device in enumerate(group):
                for number, part in enumerate(self._received(op, operands, group, place)):
                    outputs[number][device] = part
        arrays = [np.stack(parts) for parts in outputs]
        return arrays[0] if isinstance(op.shape, Array) else arrays

    def _received(
        self, op: Instruction, operands: list[np.ndarray], group: tuple[int, ...], place: int
    ) -> list[np.ndarray]:
        """What the device at a place of a group has afterwards."""
        if op.opcode == "all-to-all" and not isinstance(op.shape, Array):
            return [operands[place][member] for member in group]
        (dim,) = op.dimensions if op.opcode != "all-reduce" else (0,)
        if op.opcode == "all-gather":
            return [
                np.concatenate([operand[list(group)][at] for at in range(len(group))], axis=dim)
                for operand in operands
            ]
        if op.opcode == "all-to-all":
            return [
                np.concatenate(
                    [np.split(operands[0][member], len(group), dim)[place] for member in group],
                    axis=dim,
                )
            ]
        sums = [operand[list(group)].sum(axis=0) for operand in operands]
        return (
            sums
            if op.opcode == "all-reduce"
            else [np.split(total, len(group), dim)[place] for total in sums]
        )


def numbers(text: str, partitions: int) -> list[np.ndarray]:
    return Devices(read_module(text, scheduled=False).entry, partitions).results()


def mutated(text: str, choice: random.Random) -> str:
    """The text with two devices, operands, dimensions, or ends of slices the other way round or moved."""
    lines = text.split("\n")
    entry = next(at for at, line in enumerate(lines) if line.startswith("ENTRY"))
    at = choice.randrange(entry + 1, len(lines) - 2)
    lines[at] = choice.choice((_other_devices, _other_operands, _other_dims, _other_ends))(
        lines[at], choice
    )
    return "\n".join(lines)


def _swapped(text: str, pattern: str, choice: random.Random) -> str:
    """Two of the matches have changed places."""
    spans = [match.span() for match in re.finditer(pattern, text)]
    if len(spans) < 2:
        return text
    (a, b), (c, d) = sorted(choice.sample(spans, 2))
    return text[:a] + text[c:d] + text[b:c] + text[a:b] + text[d:]


def _other_devices(line: str, choice: random.Random) -> str:
    return _GROUPS.sub(lambda match: _swapped(match[0], r"\d+", choice), line)


def _other_operands(line: str, choice: random.Random) -> str:
    head, opened, tail = line.partition("(%")
    operands, closed, more = tail.partition(")")
    return head + _swapped(opened + operands, r"%[\w.]+", choice) + closed + more


def _other_dims(line: str, choice: random.Random) -> str:
    return re.sub(r" dimensions=\{[\d,]+\}", lambda match: _swapped(match[0], r"\d+", choice), line)


def _other_ends(line: str, choice: random.Random) -> str:
    by = choice.choice((-1, 1))
    return re.sub(
        r"slice=\{\[(\d+):(\d+)\]",
        lambda match: f"slice={{[{int(match[1]) + by}:{int(match[2]) + by}]",
        line,
        count=1,
    )


def is_run(case: Case) -> bool:
    """Is there no loop in it, no call, and nothing rounded?"""
    return case.wire is None and not re.search(
        r" (?:while|call|broadcast)\(", case.plain + case.shaped
    )


RUN = {name: case for name, case in ACCEPTED.items() if is_run(case)}


@pytest.mark.parametrize("name", RUN)
def test_what_is_accepted_computes_the_same(name: str) -> None:
    """And what is refused is one of few: most mutants compute other numbers."""
    case, choice, counts = RUN[name], random.Random(name), Counter[str]()
    plain = numbers(case.plain, case.partitions)
    for expected, actual in zip(plain, numbers(case.shaped, case.partitions), strict=True):
        assert np.array_equal(expected, actual)
    for _ in range(40):
        text = mutated(case.shaped, choice)
        if text == case.shaped or (accepted := _is_accepted(case, text)) is None:
            continue
        same = _computes(text, plain, case.partitions)
        counts[f"{accepted} {same}"] += 1
        assert same or not accepted, text
    assert counts["False True"] <= 2, counts


def _is_accepted(case: Case, text: str) -> bool | None:
    """None where the text is no module."""
    plain, shaped = (read_module(source, scheduled=False) for source in (case.plain, text))
    try:
        judge_shaped(plain, shaped, case.partitions)
    except NotThePlainModuleError:
        return False
    return True


def _computes(text: str, plain: list[np.ndarray], partitions: int) -> bool:
    try:
        results = numbers(text, partitions)
    except (NotRunError, ValueError, KeyError):
        return False
    return all(
        np.array_equal(expected, actual) for expected, actual in zip(plain, results, strict=True)
    )
