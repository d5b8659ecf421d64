"""What no plan beats: the least seconds of a step within a budget, in whatever order it runs.

Two parts, both by the roofline. What runs in any case: matrix work, and the passes over memory that no fusion spares
(`passes_seconds`). And what the budget costs on top: at the moment at which an operation runs for the first time, all
that it is computed from has been computed, and nothing that is computed from it. What the latter will read is then on
the device, on the host, or computed again later. The cheapest such mix is a linear program over the values of that
moment; the largest over a few moments is taken. Values that move count by the link: no step is faster than its copies.
"""

from __future__ import annotations

from memplan.planning.cost import calls_library, has_triton, kernel_seconds
from memplan.planning.devices import Device
from memplan.planning.graph import Graph, Op
from memplan.planning.linear import LinearProgram
from memplan.planning.simulate import base_nbytes

_MOMENTS = 4  # that are tried


def least_seconds(graph: Graph, device: Device, budget_bytes: int, host_budget_bytes: int) -> float:
    """Seconds that every plan within the budgets takes at least."""
    bound = _Bound(graph, device)
    always = bound.work_s + passes_seconds(graph, device)
    crowded = bound.crowded(budget_bytes)
    picked = {crowded[number * (len(crowded) - 1) // (_MOMENTS - 1)] for number in range(_MOMENTS) if crowded}
    return max((bound.at(op, always, budget_bytes, host_budget_bytes) for op in sorted(picked)), default=always)


def passes_seconds(graph: Graph, device: Device) -> float:
    """Seconds of reading and writing device memory outside matrix work that no fusion spares.

    A reduction reads what it is computed from, or something made of that; so does whatever makes the operand of a
    library's call from reduced values, and it writes the operand. Of all that such a pass may read only the largest is
    counted. Two passes over the same are two if one waits for the other; where XLA fuses by Triton they may be one.
    """
    apart, wanted = not has_triton(device), wanted_ops(graph)
    reads: list[dict[int, int]] = [{} for _ in graph.values]  # root -> bytes that must come from it, or be made of it
    spent: list[dict[int, int]] = [{} for _ in graph.values]  # root -> bytes of passes over it that came before
    waits = [False] * len(graph.values)  # for a reduction, since the last matrix work
    total: dict[int, int] = {}
    written = 0
    done: set[int] = set()
    for value in graph.inputs:
        reads[value] = {value: graph.nbytes(value)}

    def passed(sources: dict[int, int], before: dict[int, int]) -> dict[int, int]:
        if not sources:
            return before
        root = max(sources, key=lambda one: (sources[one], -one))
        after = (before.get(root, 0) if apart else 0) + sources[root]
        total[root] = max(total.get(root, 0), after)
        return {**before, root: after}

    for number, op in enumerate(graph.ops):
        if not wanted[number]:
            continue
        before: dict[int, int] = {}
        sources: dict[int, int] = {}
        for value in dict.fromkeys(op.inputs):
            for root, nbytes in spent[value].items():
                before[root] = max(before.get(root, 0), nbytes)
            for root, nbytes in reads[value].items():
                sources[root] = max(sources.get(root, 0), nbytes)
        if op.fusion == "kernel":
            if _materializes(op, device):
                for value in dict.fromkeys(op.inputs):
                    if waits[value] and value not in done:
                        done.add(value)
                        written += graph.nbytes(value)
                        passed(reads[value], spent[value])
            sources, waiting = {}, False
        elif op.fusion == "reduction":
            before, sources, waiting = passed(sources, before), {}, True
        else:
            waiting = any(waits[value] for value in op.inputs)
        for value in op.outputs:
            waits[value], spent[value] = waiting, before
            own = graph.nbytes(value)
            reads[value] = {root: min(nbytes, own) for root, nbytes in sources.items()} if sources else {value: own}
    return (sum(total.values()) + written) / device.memory_bandwidth


def wanted_ops(graph: Graph) -> list[bool]:
    """Which ops any output is computed from; the compiler drops the others."""
    found = [False] * len(graph.ops)
    read = set(graph.outputs)
    for number in reversed(range(len(graph.ops))):
        op = graph.ops[number]
        if not read.isdisjoint(op.outputs):
            found[number] = True
            read.update(op.inputs)
    return found


def _materializes(op: Op, device: Device) -> bool:
    """Does it read its operands from memory and write its result there?"""
    return bool(op.flops_dtype) and op.fusion == "kernel" and (device.target is None or calls_library(op, device))


def _least(graph: Graph, op: Op, device: Device) -> float:
    """Seconds of one run that no fusion spares."""
    if op.fusion != "kernel" or not op.flops_dtype:
        return 0.0
    moved = sum(map(graph.nbytes, {*op.inputs, *op.outputs})) if _materializes(op, device) else 0
    return kernel_seconds(op.flops, op.flops_dtype, moved, device)


class _Bound:
    """Moments of one graph."""

    def __init__(self, graph: Graph, device: Device):
        self.graph, self.device = graph, device
        self.least_s = [_least(graph, op, device) for op in graph.ops]
        self.wanted = wanted_ops(graph)

    @property
    def work_s(self) -> float:
        """Seconds of what runs at least once; the compiler runs the same work on the same operands once."""
        known = zip(self.graph.ops, self.least_s, self.wanted, strict=True)
        return sum({(op.name, op.inputs, s): s for op, s, wanted in known if wanted}.values())

    def crowded(self, budget_bytes: int) -> list[int]:
        """Matrix work, in program order, while whose results that are still to be read exceed the budget."""
        last = [-1] * len(self.graph.values)  # op that reads it last, by way of work that melts too
        for number in reversed(range(len(self.graph.ops))):
            op = self.graph.ops[number]
            if self.wanted[number]:
                until = number if op.fusion == "kernel" else max([number, *(last[v] for v in op.outputs)])
                for value in op.inputs:
                    last[value] = max(last[value], until)
        ending: dict[int, int] = {}
        live, found = base_nbytes(self.graph), []
        for number, op in enumerate(self.graph.ops):
            if op.fusion == "kernel":
                for value in op.outputs:
                    live += self.graph.passing_nbytes(value)
                    ending[last[value]] = ending.get(last[value], 0) + self.graph.passing_nbytes(value)
            if self.least_s[number] and self.wanted[number] and live > budget_bytes:
                found.append(number)
            live -= ending.pop(number, 0)
        return found

    def at(self, op: int, always: float, budget_bytes: int, host_budget_bytes: int) -> float:
        """The bound by the moment at which `op` runs for the first time; `always` where that is no moment at all."""
        return max(always, _Moment(self, op).least(always, budget_bytes, host_budget_bytes) or always)

    def before(self, op: int) -> set[int]:
        """Ops that `op` is computed from, by way of others too."""
        found, left = set(), [op]
        while left:
            for value in self.graph.ops[left.pop()].inputs:
                made = self.graph.producer[value]
                if made is not None and made not in found:
                    found.add(made)
                    left.append(made)
        return found

    def behind(self, op: int) -> set[int]:
        """`op` and the wanted ops that are computed from it, by way of others too."""
        found, left = {op}, [op]
        while left:
            for value in self.graph.ops[left.pop()].outputs:
                for reader in self.graph.readers[value]:
                    if reader not in found and self.wanted[reader]:
                        found.add(reader)
                        left.append(reader)
        return found


class _Moment:
    """The linear program: shares of values on the device and on the host, shares of operations that run again."""

    def __init__(self, bound: _Bound, op: int):
        self.bound, self.graph, self.op = bound, bound.graph, op
        self.done, self.to_come = bound.before(op), bound.behind(op)
        self.program = LinearProgram()
        self.step = self.program.excess(1.0)
        self.held: dict[int, int] = {}
        self.moved: dict[int, int] = {}
        self.again: dict[int, int] = {}

    def least(self, always: float, budget_bytes: int, host_budget_bytes: int) -> float | None:
        """Seconds; None where nothing fits, which is for others to say."""
        self.require(host_budget_bytes > 0)
        self.limit(budget_bytes, host_budget_bytes)
        work = [(variable, -self.bound.least_s[op]) for op, variable in self.again.items() if op in self.done]
        self.program.at_least(always, [(self.step, 1.0), *work])
        link = self.bound.device.link.bandwidth
        copies = [(variable, -self.graph.nbytes(value) / link) for value, variable in self.moved.items()]
        self.program.at_least(0.0, [(self.step, 1.0), *copies])
        found = self.program.ready().relax()
        return None if found.values is None else found.cost

    def require(self, may_move: bool) -> None:
        """What operations to come read is there, and so is what is read to compute it again."""
        made = self.graph.producer
        left: list[tuple[int, int | None]] = [(value, None) for value in sorted(self.read_later())]
        while left:
            value, asker = left.pop()
            op = made[value]
            if op is None or op in self.to_come:
                continue
            known = op in self.again
            ways = [self.share(self.again, op)]
            if op in self.done:
                ways += [self.share(self.held, value), *([self.share(self.moved, value)] if may_move else [])]
            if asker is None:
                self.program.at_least(1.0, [(way, 1.0) for way in ways])
            else:
                self.program.implies(asker, ways)
            if not known:
                if op in self.done and not self.graph.ops[op].recomputable:
                    self.program.at_least(0.0, [(self.again[op], -1.0)])
                left.extend((source, self.again[op]) for source in dict.fromkeys(self.graph.ops[op].inputs))

    def read_later(self) -> set[int]:
        return {value for op in self.to_come for value in self.graph.ops[op].inputs}

    def limit(self, budget_bytes: int, host_budget_bytes: int) -> None:
        """Held values, arguments, and what the operation itself reads from memory and writes there, have to fit."""
        op, used = self.graph.ops[self.op], base_nbytes(self.graph)
        if _materializes(op, self.bound.device):
            used += sum(self.graph.passing_nbytes(value) for value in op.outputs)
            for value in op.inputs:
                made = self.graph.producer[value]
                if value in self.held and made is not None and self.graph.ops[made].fusion != "view":
                    self.program.at_least(1.0, [(self.held[value], 1.0)])
        sizes = [(variable, -self.graph.passing_nbytes(value) / budget_bytes) for value, variable in self.held.items()]
        self.program.at_least(used / budget_bytes - 1.0, sizes)
        moved = [(variable, -self.graph.nbytes(value) / budget_bytes) for value, variable in self.moved.items()]
        self.program.at_least(-host_budget_bytes / budget_bytes, moved)

    def share(self, among: dict[int, int], key: int) -> int:
        if key not in among:
            among[key] = self.program.share()
        return among[key]
