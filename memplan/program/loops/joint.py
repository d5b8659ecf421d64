"""The bodies of a pair as one flat jaxpr, which is rewritten whole and divided again.

In it, a backward body reads the values of the forward body directly. So a pair of equations that
are in different bodies of an outer pair is a pair like any other.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from memplan.planning.loops import Loop, Residuals, recomputed_groups
from memplan.program import compat
from memplan.program.flat import Flat, flatten, renamed
from memplan.program.interpret import interpret_eqns
from memplan.program.loops.again import Again, context_of, with_groups
from memplan.program.loops.pairs import Pair

Store = dict[int, Any]
"""What rewritten forward equations save for their backward equations: number -> tree of arrays."""
Rewrite = Callable[[compat.ClosedJaxpr], compat.ClosedJaxpr]
"""Flattens a body, and rewrites the pairs inside."""
Replacement = Callable[[list[Any], Store], Sequence[Any]]
"""(operands, store) -> results of an equation; None for a result that it no longer makes."""


def rule_of(replacements: Mapping[int, Replacement], store: Store) -> Callable[..., Sequence[Any]]:
    """The rule of an interpreter that runs other functions in place of some equations.

    Args:
      replacements: by id of the equation.
    """

    def run(eqn: compat.JaxprEqn | Again, operands: list[Any]) -> Sequence[Any]:
        if isinstance(eqn, Again):
            return eqn.run(operands)
        replacement = replacements.get(id(eqn))
        return replacement(operands, store) if replacement else compat.bind(eqn, operands)

    return run


@dataclass(frozen=True)
class Halves:
    """The bodies of a pair, after a change of what they have in common.

    Attributes:
      forward: its results are its own, then those for the backward bodies.
      own: how many results are its own.
      on_host: by result for the backward bodies: is it stored in host memory?
      backwards: their inputs are their own, then the results of the forward body for them.
    """

    forward: Flat
    own: int
    on_host: tuple[bool, ...]
    backwards: tuple[compat.ClosedJaxpr, ...]

    @property
    def crossing(self) -> Sequence[Any]:
        """The forward body's results for the backward bodies: variables and literals."""
        return self.forward.outvars[self.own :]

    def pruned(self) -> Halves:
        """Without results that no backward body reads, and without duplicates."""
        count = len(self.crossing)
        if not count:
            return self
        reads = [compat.read_inputs(closed)[-count:] for closed in self.backwards]
        keys = [atom if compat.is_var(atom) else id(atom) for atom in self.crossing]
        wanted = [any(flags) for flags in zip(*reads, strict=True)]
        numbers = dict[Any, int]()
        for number, key in enumerate(keys):
            if wanted[number]:
                numbers.setdefault(key, number)
        kept = [self.crossing[number] for number in numbers.values()]
        position = {key: number for number, key in enumerate(numbers)}

        def narrowed(closed: compat.ClosedJaxpr) -> compat.ClosedJaxpr:
            closed = compat.dce(closed)
            own, crossing = closed.jaxpr.invars[:-count], closed.jaxpr.invars[-count:]

            def run(*operands: Any) -> list[Any]:
                values = operands[len(own) :]
                bound = dict(compat.consts_of(closed))
                bound.update(zip(own, operands, strict=False))
                for var, key in zip(crossing, keys, strict=True):
                    if key in position:
                        bound[var] = values[position[key]]
                return interpret_eqns(closed.jaxpr.eqns, bound, closed.jaxpr.outvars)

            return jax.make_jaxpr(run)(*compat.structs_of([*own, *kept]))

        results = [*self.forward.outvars[: self.own], *kept]
        forward = Flat(compat.dce(compat.with_results(self.forward.closed, results)))
        on_host = tuple(self.on_host[number] for number in numbers.values())
        return Halves(forward, self.own, on_host, tuple(map(narrowed, self.backwards)))


@dataclass(frozen=True)
class Joint:
    """The forward body of a pair, then its backward bodies, in one flat jaxpr.

    Attributes:
      forward: the forward body; its equations are the first of `flat`.
      inputs: of each body, without residuals.
      results: of each body, without residuals.
      ends: of each body, the number of its last equation, plus 1.
    """

    flat: Flat
    forward: Flat
    inputs: tuple[list[Any], ...]
    results: tuple[list[Any], ...]
    ends: tuple[int, ...]

    @classmethod
    def of(cls, pair: Pair, index: int) -> Joint:
        """The bodies of a pair, by their index among the bodies of an equation."""
        forward = pair.flat.inner(pair.forward, index)
        results = enumerate(forward.outvars)
        bodies = [forward.closed]
        inputs = [list(forward.invars)]
        outputs = [[atom for position, atom in results if position not in pair.residuals]]
        eqns = list(forward.eqns)
        ends = [len(eqns)]
        for number, backward in enumerate(pair.backwards):
            body = pair.flat.inner(backward, index)
            first = len(pair.flat.eqns[backward].invars) - len(body.invars)
            names = {
                body.invars[operand - first]: forward.outvars[result]
                for operand, result in pair.operands_of(number).items()
            }
            bodies.append(body.closed)
            inputs.append([var for var in body.invars if var not in names])
            outputs.append([renamed(names, atom) for atom in body.outvars])
            eqns += [
                eqn.replace(invars=[renamed(names, atom) for atom in eqn.invars])
                for eqn in body.eqns
            ]
            ends.append(len(eqns))
        flattened = itertools.chain.from_iterable
        closed = compat.joined(bodies, flattened(inputs), flattened(outputs), eqns)
        return cls(Flat(closed), forward, tuple(inputs), tuple(outputs), tuple(ends))

    @property
    def read_later(self) -> list[Any]:
        """The variables of the forward body that the backward bodies read."""
        values = set(self.forward.values)
        reads = [atom for eqn in self.flat.eqns[self.ends[0] :] for atom in eqn.invars]
        reads += [atom for results in self.results[1:] for atom in results]
        return [var for var in dict.fromkeys(filter(compat.is_var, reads)) if var in values]

    def halves(
        self,
        replacements: Mapping[int, Replacement],
        rewrite: Rewrite,
        loop: Loop | None = None,
        residuals: Residuals | None = None,
    ) -> Halves:
        """The bodies again, with other functions in place of some equations, and other residuals.

        Args:
          replacements: by id of the equation.
          rewrite: flattens a backward body, and rewrites the pairs inside.
          loop: the forward body as planners see it, if it gets other residuals.
        """
        read_later = self.read_later
        kept = read_later
        on_host: tuple[bool, ...] = ()
        if loop is not None and residuals is not None:
            numbers = (*residuals.stacked, *sorted(loop.available))
            kept = [self.forward.values[number] for number in numbers]
            kept = [var for var in kept if var not in self._consts]
            on_host = residuals.stacked_on_host
        recomputed = [var for var in read_later if var not in kept]
        end = self.ends[0]
        saved = list[Any]()  # the structure of what the forward body returns for the others

        def run_forward(*inputs: Any) -> list[Any]:
            store: Store = {}
            bound = {**self._consts, **dict(zip(self.inputs[0], inputs, strict=True))}
            outputs = [*self.results[0], *kept]
            results = interpret_eqns(
                self.flat.eqns[:end], bound, outputs, rule_of(replacements, store)
            )
            own = results[: len(self.results[0])]
            leaves, structure = jax.tree.flatten((results[len(own) :], store))
            saved[:] = [structure]
            return [*own, *leaves]

        forward = Flat(flatten(jax.make_jaxpr(run_forward)(*compat.structs_of(self.inputs[0]))))
        crossing = compat.structs_of(forward.outvars[len(self.results[0]) :])

        def traced(number: int) -> compat.ClosedJaxpr:
            inputs = self.inputs[number]
            eqns = self.flat.eqns[self.ends[number - 1] : self.ends[number]]

            def run_backward(*operands: Any) -> list[Any]:
                values, store = jax.tree.unflatten(saved[0], operands[len(inputs) :])
                bound = {**self._consts, **dict(zip(kept, values, strict=True))}
                bound.update(zip(inputs, operands, strict=False))
                results = self.results[number]
                if loop is None or residuals is None:
                    return interpret_eqns(eqns, bound, results, rule_of(replacements, store))
                groups = [
                    Again.of([self.forward.eqns[op] for op in group], recomputed)
                    for group in recomputed_groups(loop, residuals)
                ]
                ordered = with_groups(eqns, groups, results, waits=loop.is_branch)
                return interpret_eqns(
                    ordered, bound, results, rule_of(replacements, store), context_of
                )

            return rewrite(jax.make_jaxpr(run_backward)(*compat.structs_of(inputs), *crossing))

        backwards = tuple(traced(number) for number in range(1, len(self.ends)))
        on_host += (False,) * (len(crossing) - len(on_host))
        return Halves(forward, len(self.results[0]), on_host, backwards).pruned()

    @property
    def _consts(self) -> dict[Any, Any]:
        return dict(compat.consts_of(self.flat.closed))
