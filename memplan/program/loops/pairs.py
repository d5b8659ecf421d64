"""Find residuals that cross a boundary: results that an equation makes for others of its kind.

Such an equation is a loop, a conditional or a `shard_map`: the forward part of a step that jax
differentiated there. The others are the backward parts.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from memplan.planning.loops import Loop, Residuals, recomputed_ops
from memplan.planning.problem import Pin
from memplan.program import compat
from memplan.program.flat import Flat
from memplan.program.pins import pin_of

# Equations that change one number's shape only.
_RESHAPES = frozenset({"broadcast_in_dim", "reshape", "squeeze"})


@dataclass(frozen=True, eq=False)
class Pair:
    """A forward equation, and the backward equations that alone read some of its results.

    Attributes:
      flat: the jaxpr of the equations.
      forward: the number of the forward equation.
      backwards: the numbers of the backward equations, ascending.
      residuals: position of such a result -> by backward equation, the position of the operand that
        reads it; None if it reads it not.
    """

    flat: Flat
    forward: int
    backwards: tuple[int, ...]
    residuals: Mapping[int, tuple[int | None, ...]]

    @property
    def forward_eqn(self) -> compat.JaxprEqn:
        return self.flat.eqns[self.forward]

    @property
    def backward_eqns(self) -> list[compat.JaxprEqn]:
        return [self.flat.eqns[number] for number in self.backwards]

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of all its equations."""
        return (self.forward, *self.backwards)

    @property
    def kind(self) -> str:
        """The name of the equations' primitive."""
        return self.forward_eqn.primitive.name

    @property
    def source(self) -> str:
        """`file:line` of the forward equation, or ''."""
        return compat.relative(compat.source_of(self.forward_eqn))

    def operands_of(self, backward: int) -> dict[int, int]:
        """The operands of a backward equation that are residuals: position -> result's position.

        Args:
          backward: its index in `backwards`.
        """
        reads = ((reads[backward], result) for result, reads in self.residuals.items())
        return {operand: result for operand, result in reads if operand is not None}


def pairs(flat: Flat) -> Iterator[Pair]:
    """Yield the pairs of a flat jaxpr; every equation is in one at most.

    A backward equation belongs to the equation that makes most residuals for it.
    """
    readers = _Readers(flat)
    paired = set[int]()
    backwards = defaultdict[int, list[int]](list)
    for number in range(len(flat.eqns)):
        counts = readers.residuals_for(number)
        free = {forward: count for forward, count in counts.items() if forward not in paired}
        if free:
            forward = max(free, key=free.__getitem__)
            if readers.is_pair(forward, number):
                backwards[forward].append(number)
                paired.add(number)
    for forward, numbers in backwards.items():
        residuals = readers.read_by(forward, numbers)
        if residuals:
            yield Pair(flat, forward, tuple(numbers), residuals)


def last_chained(flat: Flat, end: int) -> Pair | None:
    """The last pair whose forward equation is a backward equation of another pair; None if none is.

    The gradient of a gradient has such: its backward loops make residuals for one another.

    Args:
      end: the number of the first equation that is not its forward equation.
    """
    readers = _Readers(flat)
    backwards = {number for pair in pairs(flat) for number in pair.backwards if number < end}
    if not backwards:
        return None
    residuals_for = [readers.residuals_for(number) for number in range(len(flat.eqns))]
    for forward in sorted(backwards, reverse=True):
        numbers = [
            number
            for number, counts in enumerate(residuals_for)
            if forward in counts and readers.is_pair(forward, number)
        ]
        residuals = readers.read_by(forward, numbers) if numbers else {}
        if residuals:
            return Pair(flat, forward, tuple(numbers), residuals)
    return None


def loop_pairs(flat: Flat) -> Iterator[Pair]:
    """Yield the pairs of loops."""
    return (pair for pair in pairs(flat) if pair.kind == "scan")


class _Readers:
    """Which equations read the results of others as residuals."""

    def __init__(self, flat: Flat) -> None:
        self._flat = flat
        # variable -> the equation that makes it, its position among the results
        self._makers = {
            var: (number, position)
            for number, eqn in enumerate(flat.eqns)
            for position, var in enumerate(eqn.outvars)
        }

    def residuals_for(self, number: int) -> Mapping[int, int]:
        """The equations that make residuals for an equation: number -> count."""
        counts = defaultdict[int, int](int)
        for atom in self._flat.eqns[number].invars:
            if compat.is_var(atom) and atom in self._makers:
                maker, result = self._makers[atom]
                if self._is_residual(maker, result) and self._may_read(maker, result, number):
                    counts[maker] += 1
        return counts

    def read_by(self, forward: int, numbers: Sequence[int]) -> dict[int, tuple[int | None, ...]]:
        """The results of an equation that only these equations read; see `Pair.residuals`."""
        residuals = {}
        for position, var in enumerate(self._flat.eqns[forward].outvars):
            readers = self._flat.readers.get(var, set())
            is_read = readers and readers <= set(numbers) and self._is_residual(forward, position)
            if is_read and all(self._may_read(forward, position, reader) for reader in readers):
                eqns = [self._flat.eqns[number] for number in numbers]
                residuals[position] = tuple(
                    eqn.invars.index(var) if var in eqn.invars else None for eqn in eqns
                )
        return residuals

    def is_pair(self, forward: int, backward: int) -> bool:
        """Do two equations of one kind run the same bodies, as often, on the same devices?"""
        first, second = self._flat.eqns[forward], self._flat.eqns[backward]
        match first.primitive.name:
            case "scan":
                return first.params["length"] == second.params["length"]
            case "cond":
                index, other = first.invars[0], second.invars[0]
                return self._origin(index) == self._origin(other)
            case _:
                names = ("mesh", "newly_manual_axes", "check_vma")
                return all(first.params[name] == second.params[name] for name in names)

    def _is_residual(self, maker: int, result: int) -> bool:
        """May a result be a residual: a loop's stack, a value of a conditional or `shard_map`?"""
        eqn = self._flat.eqns[maker]
        if eqn.outvars[result] in self._flat.returned:
            return False
        scan = compat.scan_of(eqn)
        return result >= scan.carries if scan else eqn.primitive.name in ("cond", "shard_map")

    def _may_read(self, maker: int, result: int, reader: int) -> bool:
        """Does an equation of the same kind read a result once, as its maker returns it?"""
        made, eqn = self._flat.eqns[maker], self._flat.eqns[reader]
        var = made.outvars[result]
        if eqn.primitive is not made.primitive or list(eqn.invars).count(var) != 1:
            return False
        position = eqn.invars.index(var)
        scan = compat.scan_of(eqn)
        if scan:
            return position >= scan.consts + scan.carries
        if eqn.primitive.name == "cond":
            return position > 0
        return eqn.params["in_specs"][position] == made.params["out_specs"][result]

    def _origin(self, atom: Any) -> Any:
        """The variable of a number that was only reshaped, or the literal itself."""
        while compat.is_var(atom) and atom in self._makers:
            eqn = self._flat.eqns[self._makers[atom][0]]
            if eqn.primitive.name not in _RESHAPES or compat.aval_of(eqn.outvars[0]).size != 1:
                break
            (atom,) = eqn.invars
        return atom


def loop_of(
    pair: Pair,
    index: int,
    runs: int,
    pins: Sequence[Pin],
    decided: Collection[Pair] = (),
) -> Loop:
    """A pair of loops, or a branch of a pair of conditionals, as planners see it.

    A branch is a loop of one trip.

    Args:
      index: the branch's index; 0 for loops.
      runs: how often the step runs the pair, if it is inside a loop.
      decided: pairs in the bodies, which decide for themselves what crosses this pair.
    """
    flat = pair.flat.inner(pair.forward, index)
    graph = flat.graph
    scan = compat.scan_of(pair.forward_eqn)
    carried = range(scan.consts, scan.consts + scan.carries) if scan else ()
    computed = {value for op in graph.ops for value in op.outputs}
    by_others = {
        graph.ops[inner.forward].outputs[position]
        for inner in decided
        for position in inner.residuals
    }
    empty = {number for number, var in enumerate(flat.values) if _is_empty(flat, var)}
    available = set(range(len(graph.values))).difference(carried, computed) | by_others | empty
    atoms = [flat.outvars[position] for position in pair.residuals]
    needed = {flat.number_of[atom] for atom in atoms if compat.is_var(atom)}
    backwards = [compat.scan_of(eqn) for eqn in pair.backward_eqns]
    loop = Loop(
        body=graph,
        trips=scan.trips if scan else 1,
        runs=runs,
        available=frozenset(available),
        needed=frozenset(needed - available),
        carried=tuple(carried),
        reverses=all(back and scan and back.reverse != scan.reverse for back in backwards),
        source=pair.source,
        readers=len(pair.backwards),
    )
    return replace(loop, pins=_pinned(flat, loop, pins)) if pins else loop


def _is_empty(flat: Flat, var: Any) -> bool:
    """Has a value no content, as the residuals of one branch have in another?"""
    while (maker := flat.maker.get(var)) is not None:
        if maker.primitive.name in compat.EMPTY:
            return True
        if maker.primitive.name not in ("broadcast_in_dim", "pvary"):
            return False
        (var,) = maker.invars
        if not compat.is_var(var):
            return False
    return False


def _pinned(flat: Flat, loop: Loop, pins: Sequence[Pin]) -> Mapping[int, Pin]:
    """The pins of values that the backward body reads or recomputes from, by value of the body."""
    recomputed = recomputed_ops(loop, Residuals(()))
    read = loop.needed.union(*(loop.body.ops[op].inputs for op in recomputed))
    marked = [(eqn, pin) for eqn in flat.eqns if (pin := pin_of(eqn, pins))]
    # if equations with the same mark read one another, the pin holds for the last one's result
    operands = [(atom, pin) for eqn, pin in marked for atom in eqn.invars]
    earlier_forms = {(atom, pin) for atom, pin in operands if compat.is_var(atom)}
    results = [(var, pin) for eqn, pin in marked for var in eqn.outvars]
    last_forms = [form for form in results if form not in earlier_forms]
    return {flat.number_of[var]: pin for var, pin in last_forms if flat.number_of.get(var) in read}
