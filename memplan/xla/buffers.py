"""A scheduled module -> the planning problem: its kernels, and the buffers that they write and read.

Aliases (tuples, their elements, bitcasts, barriers) have no buffer. One buffer holds a loop's carry from its first
value through the body to the result; so do an array and its update in place, and a donated argument and the output that
aliases it (`HloAliasAnalysis`).
"""

import functools
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from memplan.planning.problem import GPU_ALIGNMENT, POINTER_BYTES, Buffer, Kernel, Problem, Role
from memplan.xla.aliasing import overwritable, updated
from memplan.xla.collectives.pairs import as_synchronous, synchronous_pairs
from memplan.xla.module import Computation, Instruction, Module
from memplan.xla.shapes import Array, Shape

Tree = int | tuple["Tree", ...]  # numbers of values, in the structure of a shape


@dataclass
class Value:
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
        self._values: list[Value] = []

    def __getitem__(self, number: int) -> Value:
        return self._values[number]

    def __len__(self) -> int:
        return len(self._values)

    def add(self, name: str, array: Array, role: Role, maker: int | None) -> int:
        self._values.append(Value(name, array, role, maker, len(self._values)))
        return len(self._values) - 1

    def add_like(self, tree: Tree, name: str) -> Tree:
        """A temporary for every leaf, `name{0}`, `name{1}`, ..., without a kernel yet."""
        first = len(self)
        return map_tree(
            tree, lambda one: self.add(f"{name}{{{len(self) - first}}}", self[one].array, Role.TEMPORARY, None)
        )

    def find(self, number: int) -> int:
        """The value that this one is identical to."""
        while (same := self._values[number].same) is not None:
            number = same
        return number

    def first(self, number: int) -> int:
        """The first of the values that share its buffer."""
        number = self.find(number)
        while self._values[number].first != number:
            number = self.find(self._values[number].first)
        return number

    def unite(self, one: int, other: int) -> None:
        """Make them share one buffer."""
        low, high = sorted((self.first(one), self.first(other)))
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


_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
CPU_ALIGNMENT = 64  # bytes (`cpu_function_runtime::MinAlign`)
_AGAIN = re.compile(r"^(?:all-gather|fusion|slice|dynamic-slice)-start$")  # of pairs that may run again
_EFFECTS = ("custom_call_has_side_effect=true", "has_side_effect=true")
_ONCE = frozenset(
    """
    while conditional call infeed outfeed send recv rng rng-bit-generator rng-get-and-update-state
    all-reduce reduce-scatter all-to-all ragged-all-to-all collective-permute collective-broadcast
    """.split()  # noqa: SIM905
)


def problem_of(module: Module, on_gpu: bool, joins_pairs: bool = True) -> Problem:
    """The problem of an unmodified module; kernels have the names of their instructions, and zero seconds.

    Args:
      joins_pairs: one kernel for the start and the end of a collective during which nothing runs (`synchronous_pairs`).
    """
    return _ProblemBuilder(module, on_gpu, joins_pairs).problem()


def instruction_of(buffer: str) -> str:
    """The instruction that makes a buffer, or carries it, from the buffer's name."""
    return buffer.rpartition(":")[2].partition("{")[0]


def leaf_of(buffer: str) -> int:
    """The last number of a buffer's index; 0 if it has none."""
    index = buffer.partition("{")[2]
    return int(index.rstrip("}").rpartition(",")[2]) if index else 0


def _boundary(name: str, reads: tuple[int, ...], writes: tuple[int, ...], block: int | None) -> Kernel:
    """The begin or the end of a computation."""
    return Kernel(name, reads, writes, block=block, recomputable=False, is_boundary=True)


class _ProblemBuilder:
    """Collects kernels in order, and values, each of which becomes a buffer."""

    def __init__(self, module: Module, on_gpu: bool, joins_pairs: bool) -> None:
        self._module, self._on_gpu, self._joins_pairs = module, on_gpu, joins_pairs
        self._values = Values()
        self._kernels: list[Kernel] = []
        self._arguments: dict[int, Tree] = {}
        self._synchronous: dict[str, str] = {}  # starts of pairs during which nothing runs -> their ends
        self._starts: dict[str, int] = {}  # numbers of the kernels that start the other pairs
        self._tables_nbytes = 0
        self._alignment = GPU_ALIGNMENT if on_gpu else CPU_ALIGNMENT

    def problem(self) -> Problem:
        root = self._computation(self._module.entry, None, None)
        outputs = [self._values.find(value) for value in leaves_of(root)]
        donated = set()
        for output, argument in self._module.aliases.items():
            (given,) = leaves_of(self._arguments[argument])
            donated.add(given)
            self._values.unite(given, outputs[output])
        for value in outputs:
            if self._values[value].role is Role.TEMPORARY:
                self._values[value].role = Role.OUTPUT
        return self._number_buffers(outputs, frozenset(donated))

    def _number_buffers(self, outputs: Sequence[int], donated: frozenset[int]) -> Problem:
        """Buffers, numbered without values that are identical to others."""
        kept = [number for number in range(len(self._values)) if self._values[number].same is None]
        number = {old: new for new, old in enumerate(kept)}

        def now(values: Sequence[int]) -> tuple[int, ...]:
            return tuple(dict.fromkeys(number[self._values.find(value)] for value in values))

        buffers = []
        for old in kept:
            value = self._values[old]
            place = number[self._values.find(self._values.first(old))]
            buffers.append(Buffer(value.name, value.array.nbytes, value.role, value.maker, place))

        def among(sources: Mapping[int, tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
            return {now([result])[0]: now(values) for result, values in sources.items() if values}

        kernels = tuple(
            replace(
                one,
                reads=now(one.reads),
                writes=tuple(value for value in now(one.writes) if buffers[value].maker == at),
                may_alias=among(one.may_alias),
                may_alias_elements=among(one.may_alias_elements),
            )
            for at, one in enumerate(self._kernels)
        )
        return Problem(
            tuple(buffers),
            kernels,
            now(outputs),
            frozenset(now([*donated])),
            self._tables_nbytes,
            self._alignment,
        )

    def _computation(self, body: Computation, given: Sequence[Tree] | None, block: int | None) -> Tree:
        """Walk one computation; makes the entry's arguments, receives others. Returns the values of its root."""
        trees: dict[str, Tree] = {}
        self._synchronous |= synchronous_pairs(body) if self._joins_pairs else {}
        for op in body.ops.values():
            if op.opcode == "parameter":
                number = int(op.attributes)
                if given is None:
                    self._arguments[number] = self._new(op, None, Role.ARGUMENT)
                trees[op.name] = given[number] if given is not None else self._arguments[number]
            else:
                trees[op.name] = self._instruction(body, op, [trees[name] for name in op.operands], block)
        return trees[body.root.name]

    def _instruction(self, body: Computation, op: Instruction, operands: list[Tree], block: int | None) -> Tree:
        if op.opcode in ("bitcast", "opt-barrier", "add-dependency"):
            return operands[0]
        if op.opcode == "get-tuple-element":
            return element_of(operands[0], op.index)
        if op.opcode == "tuple":
            if op is not self._module.entry.root:  # the results' buffer is an output
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

    def _compute(self, body: Computation, op: Instruction, operands: list[Tree], block: int | None) -> Tree:
        tree = self._new(op, len(self._kernels), Role.TEMPORARY)
        made = list(leaves_of(tree))
        self._table(op.shape)
        by_name = dict(zip(op.operands, operands, strict=True))
        in_place = dict(updated(self._module, op))
        may_alias, of_elements = defaultdict[int, tuple[int, ...]](tuple), defaultdict[int, tuple[int, ...]](tuple)
        for leaf, name in overwritable(self._module, op, body.ops, self._on_gpu):
            source, operand = by_name[name], body.ops[name]
            if not isinstance(source, int):
                continue
            maker = operand.operands[0] if operand.operands and operand.operands[0] in self._synchronous else name
            if self._values[source].name in (name, maker):
                may_alias[made[leaf]] += (source,)
            elif operand.opcode == "get-tuple-element" or operand.opcode.endswith("-done"):
                of_elements[made[leaf]] += (source,)
        self._kernel(op, operands, made, block, may_alias, of_elements, bool(in_place))
        for leaf, name in in_place.items():
            (source,) = leaves_of(by_name[name])
            self._values.unite(source, made[leaf])
        return tree

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
        once = op.opcode in _ONCE or updates or any(effect in op.attributes for effect in _EFFECTS)
        in_pair = op.opcode.endswith(("-start", "-done")) and not _AGAIN.match(op.opcode)
        in_pair |= op.opcode == "fusion-start" and "kind=kCustom" in op.attributes  # which may be a collective
        self._kernels.append(
            Kernel(
                op.name,
                reads,
                tuple(writes),
                may_alias or {},
                may_alias_elements or {},
                block=block,
                recomputable=not once and not in_pair,
                started_by=self._starts.get(op.operands[0]) if op.opcode.endswith("-done") else None,
            )
        )

    def _start(self, op: Instruction, operands: list[Tree], block: int | None) -> Tree:
        """The start of an asynchronous pair: its tuple names the operands, and holds the result."""
        shape = op.shape
        if op.opcode == "copy-start":
            given: dict[int, Tree] = {1: operands[0]}
        elif isinstance(shape, tuple) and isinstance(shape[0], tuple):
            given = {0: tuple(operands)}
        elif op.opcode.startswith(("all-gather", "collective-permute")) and isinstance(shape, tuple):
            given = {0: operands[0] if len(operands) == 1 else tuple(operands)}
        else:
            given = {}
        if not isinstance(shape, tuple):
            tree = self._new(op, len(self._kernels), Role.TEMPORARY)
        else:
            tree = tuple(
                given[i] if i in given else tree_of(part, self._maker(op, len(self._kernels), Role.TEMPORARY, f"{i},"))
                for i, part in enumerate(shape)
            )
            for table in (shape, *shape):
                self._table(table)
        self._starts[op.name] = len(self._kernels)
        old = {value for part in given.values() for value in leaves_of(part)}
        self._kernel(op, operands, [value for value in leaves_of(tree) if value not in old], block)
        for position, made in self._updated_by(op, tree):
            (source,) = leaves_of(operands[position])
            self._values.unite(source, made)
        return tree

    def _updated_by(self, start: Instruction, tree: Tree) -> Iterator[tuple[int, int]]:
        """Positions of operands that an asynchronous pair updates in place, and the values of its start that result."""
        for index, position in start.aliased_outputs:
            (made,) = leaves_of(functools.reduce(element_of, index, tree))
            yield position, made
        if start.opcode == "fusion-start" and isinstance(start.shape, tuple):
            results = list(leaves_of(element_of(tree, 1)))
            for leaf, name in updated(self._module, replace(start, opcode="fusion", shape=start.shape[1])):
                yield start.operands.index(name), results[leaf]

    def _done(self, op: Instruction, started: Tree, block: int | None) -> Tree:
        """The end of an asynchronous pair."""
        if op.operands[0] in self._synchronous:  # of which its start has made everything
            return started
        self._kernel(op, [started], (), block)
        return _result(op, started)

    def _call(self, op: Instruction, operands: list[Tree], block: int | None) -> Tree:
        """One kernel if it is called as one, as XLA:CPU does for parallel calls; otherwise the kernels inside it."""
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
        """Put the kernels from the first on inside the last one."""
        last = len(self._kernels) - 1
        for number in range(first, last):
            if self._kernels[number].block == around:
                self._kernels[number] = replace(self._kernels[number], block=last)

    def _loop(self, op: Instruction, state: Tree, block: int | None) -> Tree:
        """Body and condition come before the loop itself, as in XLA's flattened schedule."""
        condition, body = op.attribute("condition").lstrip("%"), op.attribute("body").lstrip("%")
        first = len(self._kernels)
        carried = {name: self._values.add_like(state, f"{name}:{op.name}") for name in (condition, body)}
        ends = {}
        for name in (condition, body):
            tree = carried[name]
            self._kernels.append(_boundary(f"{name}:begin", (), tuple(leaves_of(tree)), block))
            for value in leaves_of(tree):
                self._values[value].maker = len(self._kernels) - 1
            ends[name] = self._computation(self._module[name], [tree], block)
            self._end(name, ends[name], block)
        result = self._values.add_like(state, op.name)
        self._table(op.shape)
        for value in leaves_of(result):
            self._values[value].maker = len(self._kernels)
        self._kernel(op, [state], list(leaves_of(result)), block)
        if trips := _TRIPS.search(op.attributes):
            self._kernels[-1] = replace(self._kernels[-1], trips=int(trips[1]))
        self._tie(state, carried[condition], carried[body], ends[body], result)
        self._put_within(first, block)
        return result

    def _tie(self, state: Tree, *others: Tree) -> None:
        """One buffer for each leaf; a leaf that the body passes through unchanged is one value throughout."""
        for begin, tested, inside, end, after in zip(*map(list, map(leaves_of, (state, *others))), strict=True):
            if self._values.find(end) == self._values.find(inside):
                for value in (tested, inside, after):
                    self._values[value].same = begin
            else:
                for value in (tested, inside, end, after):
                    self._values.unite(begin, value)

    def _conditional(self, op: Instruction, operands: list[Tree], block: int | None) -> Tree:
        """The branches one after another, then the conditional, whose results share their buffers.

        What is inside of a branch belongs to its end, as the body of a loop to the loop.
        """
        first = len(self._kernels)
        ends = []
        for name, given in zip(op.called, operands[1:], strict=True):
            begin = len(self._kernels)
            ends.append(self._computation(self._module[name], [given], block))
            self._end(name, ends[-1], block)
            self._put_within(begin, block)
        result = self._new(op, len(self._kernels), Role.TEMPORARY)
        self._table(op.shape)
        self._kernel(op, operands, list(leaves_of(result)), block)
        for end in ends:
            for made, given in zip(leaves_of(result), leaves_of(end), strict=True):
                self._values.unite(given, made)
        self._put_within(first, block)
        return result

    def _new(self, op: Instruction, maker: int | None, role: Role) -> Tree:
        return tree_of(op.shape, self._maker(op, maker, role, ""))

    def _maker(self, op: Instruction, maker: int | None, role: Role, prefix: str) -> Callable[[Array, str], int]:
        def make(array: Array, index: str) -> int:
            where = prefix + index if index else prefix.rstrip(",")
            name = f"{op.name}{{{where}}}" if where else op.name
            kind = Role.ON_HOST if array.on_host else role
            return self._values.add(name, array, kind, maker)

        return make

    def _table(self, shape: Shape) -> None:
        if isinstance(shape, tuple):
            self._tables_nbytes += -(-POINTER_BYTES * len(shape) // self._alignment) * self._alignment


def _result(op: Instruction, started: Tree) -> Tree:
    """What the end of a pair gives of the values of its start."""
    if op.opcode == "copy-done":
        return element_of(started, 0)
    if isinstance(started, int) or (op.opcode == "all-reduce-done" and not isinstance(started[0], tuple)):
        return started
    return started[1]
