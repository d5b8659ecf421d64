"""Write pairs of conditionals, or of `shard_map`s, with other residuals."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec

from memplan.program import compat
from memplan.program.loops.joint import Halves
from memplan.program.loops.pairs import Pair


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Saved:
    """The values that a forward equation saves for its backward equations."""

    operands: list[Any]  # of the forward equation, that backward bodies read
    residuals: list[Any]


@dataclass(frozen=True)
class _Source:
    """Where a backward body gets a value of the forward body from."""

    is_residual: bool  # else it is an operand of the forward equation
    number: int


@dataclass(frozen=True)
class RegionPair:
    """A pair of conditionals or of `shard_map`s with new bodies.

    The forward equation returns its own results, then the residuals. Branches of a conditional
    share residuals of one type: only one of them runs. A backward equation takes its own operands,
    those operands of the forward equation that it needs, and the residuals.
    """

    pair: Pair
    halves: Sequence[Halves]  # by branch

    def run_forward(self, operands: Sequence[Any]) -> tuple[list[Any], Saved]:
        """The results of the forward equation, None for residuals; and the saved values."""
        eqn = self.pair.forward_eqn
        replaced = self.pair.residuals
        own_specs = _without(eqn.params.get("out_specs", ()), replaced)
        out_specs = [*own_specs, *map(self._spec, self._residuals)]
        in_specs = eqn.params.get("in_specs", ())
        written = compat.with_bodies(eqn, self._forward_bodies, in_specs, out_specs)
        own = iter(compat.bind(written, operands))
        count = len(eqn.outvars)
        all_results = [None if number in replaced else next(own) for number in range(count)]
        values = list(operands[self._first :])
        return all_results, Saved([values[number] for number in self._passed], list(own))

    def run_backward(self, number: int, operands: Sequence[Any], saved: Saved) -> list[Any]:
        """The results of a backward equation, by its number among those of the pair."""
        eqn = self.pair.backward_eqns[number]
        replaced = self.pair.operands_of(number)
        outvars = self._forward_bodies[0].jaxpr.outvars
        residuals = outvars[len(outvars) - len(self._residuals) :]
        bodies = []
        for half, sources in zip(self.halves, self._sources, strict=True):
            closed = half.backwards[number]
            own = closed.jaxpr.invars[: len(closed.jaxpr.invars) - len(sources)]
            passed = [half.forward.invars[position] for position in self._passed]
            body = functools.partial(self._run_backward_body, closed, len(own), sources)
            bodies.append(_traced(eqn, body, [*own, *passed, *residuals]))
        forward_specs = self.pair.forward_eqn.params.get("in_specs", ())
        in_specs = [
            *_without(eqn.params.get("in_specs", ()), replaced),
            *(forward_specs[position] for position in self._passed if forward_specs),
            *map(self._spec, self._residuals),
        ]
        out_specs = eqn.params.get("out_specs", ())
        written = compat.with_bodies(eqn, bodies, in_specs, out_specs)
        own_operands = _without(operands, replaced)
        return compat.bind(written, [*own_operands, *saved.operands, *saved.residuals])

    @property
    def _first(self) -> int:
        """The position of an equation's first operand that its bodies take."""
        return int(self.pair.kind == "cond")

    @functools.cached_property
    def _forward_bodies(self) -> list[compat.ClosedJaxpr]:
        return [
            _traced(
                self.pair.forward_eqn,
                functools.partial(self._run_forward_body, half, sources),
                half.forward.invars,
            )
            for half, sources in zip(self.halves, self._sources, strict=True)
        ]

    @functools.cached_property
    def _shared(self) -> tuple[list[list[_Source]], list[Any]]:
        """By branch, the sources of the backward bodies; and atoms of the residuals' types."""
        by_branch = []
        residuals = list[Any]()
        for half in self.halves:
            unused = list(range(len(residuals)))
            sources = []
            for atom in half.crossing:
                if compat.is_var(atom) and atom in half.forward.invars:
                    sources.append(_Source(False, half.forward.invars.index(atom)))
                    continue
                same = (number for number in unused if _type(residuals[number]) == _type(atom))
                number = next(same, None)
                if number is None:
                    number = len(residuals)
                    residuals.append(atom)
                else:
                    unused.remove(number)
                sources.append(_Source(True, number))
            by_branch.append(sources)
        return by_branch, residuals

    @property
    def _sources(self) -> list[list[_Source]]:
        """By branch: where the backward bodies get the forward body's values from."""
        return self._shared[0]

    @property
    def _residuals(self) -> list[Any]:
        """Variables, or literals, of the residuals' types: enough for every branch."""
        return self._shared[1]

    @functools.cached_property
    def _passed(self) -> list[int]:
        """The inputs of the forward body that backward bodies read."""
        sources = itertools.chain.from_iterable(self._sources)
        return sorted({source.number for source in sources if not source.is_residual})

    def _run_forward_body(self, half: Halves, sources: Sequence[_Source], *inputs: Any) -> Any:
        """The body's own results, then the residuals."""
        results = compat.jaxpr_as_fun(half.forward.closed)(*inputs)
        values = {
            source.number: value
            for source, value in zip(sources, results[half.own :], strict=True)
            if source.is_residual
        }
        residuals = (
            values[number] if number in values else compat.empty_like(atom.aval)
            for number, atom in enumerate(self._residuals)
        )
        return [*results[: half.own], *map(self._boxed, residuals)]

    def _run_backward_body(
        self, closed: compat.ClosedJaxpr, own: int, sources: Sequence[_Source], *operands: Any
    ) -> Any:
        first = own + len(self._passed)
        passed = dict(zip(self._passed, operands[own:first], strict=True))
        residuals = operands[first:]
        crossing = (
            self._unboxed(source.number, residuals[source.number])
            if source.is_residual
            else passed[source.number]
            for source in sources
        )
        return compat.jaxpr_as_fun(closed)(*operands[:own], *crossing)

    def _boxed(self, residual: Any) -> Any:
        """A number as an array of one, since a `shard_map` divides dimensions."""
        return residual[None] if self.pair.kind == "shard_map" and not residual.ndim else residual

    def _unboxed(self, number: int, residual: Any) -> Any:
        is_number = not self._residuals[number].aval.ndim
        return residual[0] if self.pair.kind == "shard_map" and is_number else residual

    def _spec(self, residual: Any) -> PartitionSpec:
        """How a residual is divided: its first dimension, over all axes on which it varies."""
        eqn = self.pair.forward_eqn
        if self.pair.kind != "shard_map":
            return PartitionSpec()
        axes = compat.manual_axes(eqn)
        if eqn.params["check_vma"]:
            varying = compat.varying_axes(residual.aval)
            axes = tuple(axis for axis in axes if axis in varying)
        return PartitionSpec(axes) if axes else PartitionSpec()


def _traced(
    eqn: compat.JaxprEqn, body: Callable[..., Any], inputs: Sequence[Any]
) -> compat.ClosedJaxpr:
    """The jaxpr of a body of an equation, whose inputs have the types of other variables."""
    with compat.inside(eqn):
        return jax.make_jaxpr(body)(*compat.structs_of(inputs))


def _without(values: Sequence[Any], positions: Container[int]) -> list[Any]:
    return [value for position, value in enumerate(values) if position not in positions]


def _type(atom: Any) -> Any:
    return str(atom.aval)
