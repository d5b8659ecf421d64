"""A scheduled module -> the planning problem: its kernels, and the buffers that they access.

Aliases (tuples, their elements, bitcasts, barriers) have no buffer. One buffer holds a loop's carry
from its first value through the body to the result. One buffer also holds an array and its update
in place, and a donated argument and the output that aliases it (`HloAliasAnalysis`).
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import starmap

from memplan.hardware.backend import Backend
from memplan.planning.problem import POINTER_BYTES, Buffer, Kernel, Problem, Role
from memplan.xla.aliasing import overwritable, updated
from memplan.xla.collectives.pairs import as_synchronous, synchronous_pairs
from memplan.xla.module import Computation, Instruction, Module
from memplan.xla.shapes import Array, Shape

Tree = int | tuple["Tree", ...]
"""Numbers of values, in the structure of a shape."""


@dataclass
class BufferValue:
    """The result of an instruction, or one leaf of it."""

    name: str
    array: Array
    role: Role
    maker: int | None  # number of a kernel
    first: int  # the first of the values that must share its buffer
    same: int | None = None  # the value that it is identical to


class Values:
    """Values by number."""

    def __init__(self) -> None:
        self._values: list[BufferValue] = []

    def __getitem__(self, number: int) -> BufferValue:
        return self._values[number]

    def __len__(self) -> int:
        return len(self._values)

    def add(self, name: str, array: Array, role: Role, maker: int | None) -> int:
        number = len(self._values)
        self._values.append(BufferValue(name, array, role, maker, number))
        return number

    def add_like(self, tree: Tree, name: str) -> Tree:
        """A temporary for every leaf, `name{0}`, `name{1}`, ..., without a kernel yet."""
        first = len(self)

        def add(leaf: int) -> int:
            leaf_name = f"{name}{{{len(self) - first}}}"
            return self.add(leaf_name, self[leaf].array, Role.TEMPORARY, None)

        return map_tree(tree, add)

    def find(self, number: int) -> int:
        """The value that this one is identical to, or itself."""
        while (same := self._values[number].same) is not None:
            number = same
        return number

    def first(self, number: int) -> int:
        """The first of the values that share its buffer."""
        number = self.find(number)
        while self._values[number].first != number:
            number = self.find(self._values[number].first)
        return number

    def unite(self, a: int, b: int) -> None:
        """Make two values share one buffer."""
        low, high = sorted((self.first(a), self.first(b)))
        self._values[high].first = low


def leaves_of(tree: Tree) -> Iterator[int]:
    if isinstance(tree, int):
        yield tree
    else:
        for part in tree:
            yield from leaves_of(part)


def element_of(tree: Tree, index: int) -> Tree:
    assert isinstance(tree, tuple)
    return tree[index]


def tree_of(shape: Shape, make: Callable[[Array, str], int], index: str = "") -> Tree:
    """Map a function over the arrays of a shape and their indices, such as `0,1`."""
    if isinstance(shape, Array):
        return make(shape, index.rstrip(","))
    return tuple(tree_of(part, make, f"{index}{i},") for i, part in enumerate(shape))


def map_tree(tree: Tree, make: Callable[[int], int]) -> Tree:
    return make(tree) if isinstance(tree, int) else tuple(map_tree(part, make) for part in tree)


# These starts of asynchronous pairs may run again, each with its end.
_RECOMPUTABLE_STARTS = frozenset(
    {"all-gather-start", "fusion-start", "slice-start", "dynamic-slice-start"},
)
# Instructions with these opcodes run once: they have effects, or every device must take part.
_ONCE = frozenset(
    """
    while conditional call infeed outfeed send recv rng rng-bit-generator rng-get-and-update-state
    all-reduce reduce-scatter all-to-all ragged-all-to-all collective-permute collective-broadcast
    """.split()  # noqa: SIM905
)


def problem_of(module: Module, backend: Backend, joins_pairs: bool = True) -> Problem:
    """The problem of an unmodified module.

    Kernels have the names of their instructions, and zero seconds.

    Args:
      joins_pairs: make one kernel of the start and the end of a collective if nothing runs between
        them (`synchronous_pairs`).
    """
    return _ProblemBuilder(module, backend, joins_pairs).problem()


def instruction_of(buffer: str) -> str:
    """The name of the instruction that makes or carries a buffer, from the buffer's name."""
    return buffer.rpartition(":")[2].partition("{")[0]


def leaf_of(buffer: str) -> int:
    """The last number of a buffer's index; 0 if it has none."""
    index = buffer.partition("{")[2]
    return int(index.rstrip("}").rpartition(",")[2]) if index else 0


def _boundary(
    name: str,
    reads: tuple[int, ...],
    writes: tuple[int, ...],
    block: int | None,
) -> Kernel:
    """The begin or the end of a computation."""
    return Kernel(name, reads, writes, block=block, recomputable=False, is_boundary=True)


class _ProblemBuilder:
    """Collects kernels in order, and values, each of which becomes a buffer."""

    def __init__(self, module: Module, backend: Backend, joins_pairs: bool) -> None:
        self._module = module
        self._backend = backend
        self._joins_pairs = joins_pairs
        self._values = Values()
        self._kernels: list[Kernel] = []
        self._arguments: dict[int, Tree] = {}
        self._synchronous: dict[str, str] = {}  # start of a pair -> end, if nothing runs between
        self._starts: dict[str, int] = {}  # start of an asynchronous pair -> number of its kernel
        self._tables_nbytes = 0
        self._alignment = backend.alignment

    def problem(self) -> Problem:
        root = self._computation(self._module.entry, None, None)
        outputs = [self._values.find(value) for value in leaves_of(root)]
        donated = set()
        for output, argument in self._module.aliases.items():
            (value,) = leaves_of(self._arguments[argument])
            donated.add(value)
            self._values.unite(value, outputs[output])
        for value in outputs:
            if self._values[value].role is Role.TEMPORARY:
                self._values[value].role = Role.OUTPUT
        return self._number_buffers(outputs, frozenset(donated))

    def _number_buffers(self, outputs: Sequence[int], donated: frozenset[int]) -> Problem:
        """The problem with a buffer for every value that is not identical to another."""
        values = self._values
        kept = [number for number in range(len(values)) if values[number].same is None]
        numbers = {value: number for number, value in enumerate(kept)}

        def buffer(value: int) -> int:
            return numbers[values.find(value)]

        def buffers_of(operands: Iterable[int]) -> tuple[int, ...]:
            return tuple(dict.fromkeys(map(buffer, operands)))

        def aliases_of(sources: Mapping[int, tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
            results = (result for result in sources if sources[result])
            return {buffer(result): buffers_of(sources[result]) for result in results}

        buffers = []
        for number in kept:
            value = values[number]
            place = buffer(values.first(number))
            buffers.append(Buffer(value.name, value.array.nbytes, value.role, value.maker, place))

        def numbered(number: int, kernel: Kernel) -> Kernel:
            written = buffers_of(kernel.writes)
            return replace(
                kernel,
                reads=buffers_of(kernel.reads),
                writes=tuple(output for output in written if buffers[output].maker == number),
                may_alias=aliases_of(kernel.may_alias),
                may_alias_elements=aliases_of(kernel.may_alias_elements),
            )

        return Problem(
            tuple(buffers),
            tuple(starmap(numbered, enumerate(self._kernels))),
            buffers_of(outputs),
            frozenset(buffers_of(donated)),
            self._tables_nbytes,
            self._alignment,
        )

    def _computation(
        self,
        body: Computation,
        arguments: Sequence[Tree] | None,
        block: int | None,
    ) -> Tree:
        """Walk a computation, and return the values of its root.

        Args:
          arguments: None of the entry, for which new values are made.
        """
        trees: dict[str, Tree] = {}
        self._synchronous |= synchronous_pairs(body) if self._joins_pairs else {}
        for op in body.ops.values():
            if op.opcode == "parameter":
                trees[op.name] = self._parameter(op, arguments)
            else:
                operands = [trees[name] for name in op.operands]
                trees[op.name] = self._instruction(body, op, operands, block)
        return trees[body.root.name]

    def _parameter(self, op: Instruction, arguments: Sequence[Tree] | None) -> Tree:
        number = op.parameter_number
        if arguments is not None:
            return arguments[number]
        self._arguments[number] = self._new(op, None, Role.ARGUMENT)
        return self._arguments[number]

    def _instruction(
        self,
        body: Computation,
        op: Instruction,
        operands: list[Tree],
        block: int | None,
    ) -> Tree:
        if op.opcode in ("bitcast", "opt-barrier", "add-dependency"):
            return operands[0]
        if op.opcode == "get-tuple-element":
            return element_of(operands[0], op.index)
        if op.opcode == "tuple":
            if op is not self._module.entry.root:  # The table of the results is an output.
                self._table(op.shape)
            return tuple(operands)
        if op.opcode in ("constant", "after-all"):
            return self._new(op, None, Role.CONSTANT)
        if op.opcode == "while":
            return self._loop(op, operands[0], block)
        if op.opcode == "call":
            return self._call(op, operands, block)
        if op.opcode == "conditional":
            return self._conditional(op, operands, block)
        if op.name in self._synchronous:
            whole = as_synchronous(op, body.ops[self._synchronous[op.name]])
            return self._compute(body, whole, operands, block)
        if op.opcode.endswith("-done"):
            return self._done(op, operands[0], block)
        if op.opcode.endswith("-start"):
            return self._start(op, operands, block)
        return self._compute(body, op, operands, block)

    def _compute(
        self,
        body: Computation,
        op: Instruction,
        operands: list[Tree],
        block: int | None,
    ) -> Tree:
        """One kernel."""
        tree = self._new(op, len(self._kernels), Role.TEMPORARY)
        results = list(leaves_of(tree))
        self._table(op.shape)
        by_name = dict(zip(op.operands, operands, strict=True))
        in_place = dict(updated(self._module, op))
        may_alias = defaultdict[int, tuple[int, ...]](tuple)
        may_alias_elements = defaultdict[int, tuple[int, ...]](tuple)
        for leaf, name in overwritable(self._module, op, body.ops, self._backend):
            source = by_name[name]
            operand = body.ops[name]
            if not isinstance(source, int):
                continue
            if self._values[source].name in (name, self._start_of(operand)):
                may_alias[results[leaf]] += (source,)
            elif operand.opcode == "get-tuple-element" or operand.opcode.endswith("-done"):
                may_alias_elements[results[leaf]] += (source,)
        self._kernel(op, operands, results, block, may_alias, may_alias_elements, bool(in_place))
        for leaf, name in in_place.items():
            (source,) = leaves_of(by_name[name])
            self._values.unite(source, results[leaf])
        return tree

    def _start_of(self, op: Instruction) -> str:
        """The start of the synchronous pair that an instruction ends, else its own name."""
        if op.operands and op.operands[0] in self._synchronous:
            return op.operands[0]
        return op.name

    def _kernel(
        self,
        op: Instruction,
        operands: Sequence[Tree],
        writes: Sequence[int],
        block: int | None,
        may_alias: Mapping[int, tuple[int, ...]] | None = None,
        may_alias_elements: Mapping[int, tuple[int, ...]] | None = None,
        updates: bool = False,
    ) -> None:
        reads = tuple(dict.fromkeys(value for tree in operands for value in leaves_of(tree)))
        runs_once = op.opcode in _ONCE or updates or op.has_side_effect
        ends_pair = op.opcode.endswith("-done")
        if ends_pair or op.opcode.endswith("-start"):
            # A custom fusion may be a collective.
            may_be_collective = op.opcode == "fusion-start" and op.kind == "kCustom"
            runs_once |= op.opcode not in _RECOMPUTABLE_STARTS or may_be_collective
        self._kernels.append(
            Kernel(
                op.name,
                reads,
                tuple(writes),
                may_alias or {},
                may_alias_elements or {},
                block=block,
                recomputable=not runs_once,
                started_by=self._starts.get(op.operands[0]) if ends_pair else None,
            )
        )

    def _start(self, op: Instruction, operands: list[Tree], block: int | None) -> Tree:
        """The start of an asynchronous pair: its tuple names the operands, and holds the result."""
        number = len(self._kernels)
        passed = _operands_in_result(op, operands)
        if not isinstance(op.shape, tuple):
            tree = self._new(op, number, Role.TEMPORARY)
        else:
            indices = range(len(op.shape))
            tree = tuple(passed[i] if i in passed else self._part(op, i, number) for i in indices)
            for table in (op.shape, *op.shape):
                self._table(table)
        self._starts[op.name] = number
        values = {value for part in passed.values() for value in leaves_of(part)}
        writes = [value for value in leaves_of(tree) if value not in values]
        self._kernel(op, operands, writes, block)
        for position, result in self._updated_by(op, tree):
            (source,) = leaves_of(operands[position])
            self._values.unite(source, result)
        return tree

    def _part(self, op: Instruction, index: int, maker: int) -> Tree:
        """New values for one element of a start's tuple."""
        assert isinstance(op.shape, tuple)
        return tree_of(op.shape[index], self._maker(op, maker, Role.TEMPORARY, f"{index},"))

    def _updated_by(self, start: Instruction, tree: Tree) -> Iterator[tuple[int, int]]:
        """In-place updates of an asynchronous pair: position of an operand, value of its update."""
        for index, position in start.aliased_outputs:
            (value,) = leaves_of(functools.reduce(element_of, index, tree))
            yield position, value
        if start.opcode == "fusion-start" and isinstance(start.shape, tuple):
            results = list(leaves_of(element_of(tree, 1)))
            fusion = start.changed(opcode="fusion", shape=start.shape[1])
            for leaf, name in updated(self._module, fusion):
                yield start.operands.index(name), results[leaf]

    def _done(self, op: Instruction, started: Tree, block: int | None) -> Tree:
        """The end of an asynchronous pair."""
        if op.operands[0] in self._synchronous:  # The kernel of its start did everything.
            return started
        self._kernel(op, [started], (), block)
        return _result(op, started)

    def _call(self, op: Instruction, operands: list[Tree], block: int | None) -> Tree:
        """One kernel if the computation has one, else the kernels inside it.

        XLA:CPU calls kernels that it parallelizes.
        """
        first = len(self._kernels)
        result = self._computation(self._module[op.called[0]], operands, block)
        if len(self._kernels) == first + 1:
            self._kernels[first] = replace(self._kernels[first], name=op.name, recomputable=False)
        else:
            self._end(op.called[0], result, block)
            self._kernel(op, operands, (), block)
            self._put_within(first, block)
        return result

    def _end(self, name: str, result: Tree, block: int | None) -> None:
        """The end of a computation, which reads all its results."""
        reads = tuple(dict.fromkeys(leaves_of(result)))
        self._kernels.append(_boundary(f"{name}:end", reads, (), block))

    def _put_within(self, first: int, around: int | None) -> None:
        """Put the kernels from the first on inside the last kernel."""
        last = len(self._kernels) - 1
        for number in range(first, last):
            if self._kernels[number].block == around:
                self._kernels[number] = replace(self._kernels[number], block=last)

    def _loop(self, op: Instruction, state: Tree, block: int | None) -> Tree:
        """Body and condition come before the loop itself, as in XLA's flattened schedule."""
        first = len(self._kernels)
        ends: list[Tree] = []
        bodies = (op.condition, op.body)
        carried = [self._values.add_like(state, f"{name}:{op.name}") for name in bodies]
        for name, tree in zip(bodies, carried, strict=True):
            values = tuple(leaves_of(tree))
            for value in values:
                self._values[value].maker = len(self._kernels)
            self._kernels.append(_boundary(f"{name}:begin", (), values, block))
            ends.append(self._computation(self._module[name], [tree], block))
            self._end(name, ends[-1], block)
        result = self._values.add_like(state, op.name)
        self._table(op.shape)
        for value in leaves_of(result):
            self._values[value].maker = len(self._kernels)
        self._kernel(op, [state], list(leaves_of(result)), block)
        if op.trip_count is not None:
            self._kernels[-1] = replace(self._kernels[-1], trips=op.trip_count)
        self._unite_carry(state, carried, ends[1], result)
        self._put_within(first, block)
        return result

    def _unite_carry(self, state: Tree, carried: Sequence[Tree], end: Tree, result: Tree) -> None:
        """Make the values of each leaf of a loop's state share one buffer.

        A leaf that the body passes through unchanged is one value throughout.

        Args:
          state, result: before and after the loop.
          carried: parameters of the condition and of the body.
          end: what the body returns.
        """
        leaves = map(leaves_of, (state, *carried, end, result))
        for before, tested, entering, leaving, after in zip(*leaves, strict=True):
            if self._values.find(leaving) == self._values.find(entering):
                for value in (tested, entering, after):
                    self._values[value].same = before
            else:
                for value in (tested, entering, leaving, after):
                    self._values.unite(before, value)

    def _conditional(self, op: Instruction, operands: list[Tree], block: int | None) -> Tree:
        """The branches one after another, then the conditional, whose results share their buffers.

        The kernels of a branch are inside its end, as those of a body are inside the loop.
        """
        first = len(self._kernels)
        ends = []
        for name, argument in zip(op.called, operands[1:], strict=True):
            begin = len(self._kernels)
            ends.append(self._computation(self._module[name], [argument], block))
            self._end(name, ends[-1], block)
            self._put_within(begin, block)
        tree = self._new(op, len(self._kernels), Role.TEMPORARY)
        results = list(leaves_of(tree))
        self._table(op.shape)
        self._kernel(op, operands, results, block)
        for end in ends:
            for result, value in zip(results, leaves_of(end), strict=True):
                self._values.unite(value, result)
        self._put_within(first, block)
        return tree

    def _new(self, op: Instruction, maker: int | None, role: Role) -> Tree:
        return tree_of(op.shape, self._maker(op, maker, role, ""))

    def _maker(
        self,
        op: Instruction,
        maker: int | None,
        role: Role,
        prefix: str,
    ) -> Callable[[Array, str], int]:
        """A function that adds a value for an array of an instruction's shape, at an index."""

        def make(array: Array, index: str) -> int:
            leaf = prefix + index if index else prefix.rstrip(",")
            name = f"{op.name}{{{leaf}}}" if leaf else op.name
            value_role = Role.ON_HOST if array.on_host else role
            return self._values.add(name, array, value_role, maker)

        return make

    def _table(self, shape: Shape) -> None:
        """Count the table of pointers of a tuple."""
        if isinstance(shape, tuple):
            units = -(-POINTER_BYTES * len(shape) // self._alignment)
            self._tables_nbytes += units * self._alignment


def _operands_in_result(op: Instruction, operands: list[Tree]) -> dict[int, Tree]:
    """Elements of a start's tuple that name its operands: index -> values of the operands."""
    if op.opcode == "copy-start":
        return {1: operands[0]}
    if not isinstance(op.shape, tuple):
        return {}
    if isinstance(op.shape[0], tuple):
        return {0: tuple(operands)}
    if op.opcode.startswith(("all-gather", "collective-permute")):
        return {0: operands[0] if len(operands) == 1 else tuple(operands)}
    return {}


def _result(op: Instruction, started: Tree) -> Tree:
    """The part of the start's values that the end of a pair returns."""
    if op.opcode == "copy-done":
        return element_of(started, 0)
    if isinstance(started, int):
        return started
    if op.opcode == "all-reduce-done" and not isinstance(started[0], tuple):
        return started
    return started[1]
