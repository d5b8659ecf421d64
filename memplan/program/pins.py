"""Names that the user gave to values -> marks that XLA's modules keep.

jax lowers `checkpoint_name` to nothing: the module has the value but not its name. The module does
have the scopes of an equation's name stack, and XLA keeps them with the instruction through all
passes.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memplan.errors import MemplanError, UnsupportedProgramError
from memplan.planning.problem import Pin, Where
from memplan.program import compat

_SCOPE = "memplan.pin."
_Wanted = Mapping[Any, int]
"""Variables, and the numbers of their pins."""
MARK = re.compile(re.escape(_SCOPE) + r"(\d+)")
"""A mark, and the number of its pin."""


def check(closed: compat.ClosedJaxpr, pins: Sequence[Pin]) -> None:
    """Check that memplan can follow the pins of a step.

    Raises:
      MemplanError: no value has the name of a pin.
      UnsupportedProgramError: the step's own `jax.checkpoint` recomputes the pinned value.
    """
    named = dict[str, list[tuple[str, bool]]]()
    for name, source, again in _names(closed, False):
        named.setdefault(name, []).append((source, again))
    for pin in pins:
        if pin.name not in named:
            names = f"it names {', '.join(map(repr, sorted(named)))}" if named else "it names none"
            no_value = f"no value of the step is named {pin.name!r}"
            raise MemplanError(f"pin: {no_value} by jax.ad_checkpoint.checkpoint_name; {names}.")
        by_step = [source for source, again in named[pin.name] if again]
        if by_step and pin.where is not Where.RECOMPUTE:
            raise UnsupportedProgramError(
                f"pin: the step's own jax.checkpoint computes {pin.name!r} again "
                f"({compat.relative(by_step[0])}), and memplan carries that out as it is written. "
                "Let its policy save the name, or remove the checkpoint."
            )


def _names(closed: compat.ClosedJaxpr, again: bool) -> Iterator[tuple[str, str, bool]]:
    """Yield every name, its `file:line`, and whether a `jax.checkpoint` recomputes the value."""
    for eqn in closed.jaxpr.eqns:
        if eqn.primitive.name == "name":
            yield eqn.params["name"], compat.source_of(eqn), again or compat.recomputes(eqn)
        for body in compat.sub_jaxprs(eqn):
            yield from _names(body, again or compat.recomputes(eqn))


def own_checkpoints(closed: compat.ClosedJaxpr) -> list[str]:
    """`file:line` of each differentiated `jax.checkpoint` of a step."""
    sources = dict[str, None]()
    for eqn in closed.jaxpr.eqns:
        if compat.recomputes(eqn):
            sources[compat.relative(compat.source_of(eqn))] = None
        else:
            sources.update(
                dict.fromkeys(
                    source
                    for body in compat.sub_jaxprs(
                        eqn,
                    )
                    for source in own_checkpoints(body)
                ),
            )
    return [source for source in sources if source]


def pin_of(eqn: compat.JaxprEqn, pins: Sequence[Pin]) -> Pin | None:
    """The pin whose mark an equation carries, unless it only computes the value again."""
    mark = None if compat.recomputes(eqn) else MARK.search(compat.scope_of(eqn))
    return pins[int(mark[1])] if mark else None


def marked(closed: compat.ClosedJaxpr, pins: Sequence[Pin]) -> compat.ClosedJaxpr:
    """The same jaxpr, in which the equations that make a pinned value carry its mark."""
    return _Marker({pin.name: number for number, pin in enumerate(pins)}).marked(closed, {})[0]


@dataclass(frozen=True)
class _Marker:
    numbers: Mapping[str, int]  # of the pins, by name

    def marked(
        self,
        closed: compat.ClosedJaxpr,
        wanted: _Wanted,
    ) -> tuple[compat.ClosedJaxpr, _Wanted]:
        """The jaxpr with marks, and the variables that have marks, its inputs among them.

        Args:
          wanted: results of the jaxpr that carry marks outside.
        """
        wanted, eqns = dict(wanted), list[compat.JaxprEqn]()
        named = (eqn for eqn in closed.jaxpr.eqns if eqn.primitive.name == "name")
        names: dict[Any, str] = {eqn.outvars[0]: eqn.params["name"] for eqn in named}
        for eqn in reversed(closed.jaxpr.eqns):
            numbers = [wanted[var] for var in eqn.outvars if var in wanted]
            # the form in which jax writes a value that a checkpoint's policy saves
            saved_by_policy = eqn.primitive.name == "reduce_precision"
            if (
                saved_by_policy
                and (
                    number := self.numbers.get(
                        names.get(eqn.invars[0], ""),
                    )
                )
                is not None
            ):
                numbers.append(number)
            if compat.recomputes(eqn):
                pass
            elif eqn.primitive.name == "name":
                number = self.numbers.get(eqn.params["name"], next(iter(numbers), None))
                if number is not None and compat.is_var(eqn.invars[0]):
                    wanted[eqn.invars[0]] = number
                    eqn = compat.in_scope(eqn, f"{_SCOPE}{number}")
            elif bodies := compat.sub_jaxprs(eqn):
                eqn = compat.with_jaxprs(eqn, [self._inside(eqn, body, wanted) for body in bodies])
            elif numbers:
                eqn = compat.in_scope(eqn, f"{_SCOPE}{min(numbers)}")
            eqns.append(eqn)
        return compat.with_eqns(closed, eqns[::-1]), wanted

    def _inside(
        self,
        eqn: compat.JaxprEqn,
        body: compat.ClosedJaxpr,
        wanted: dict[Any, int],
    ) -> compat.ClosedJaxpr:
        """A computation of an equation with marks; its marked inputs are added to `wanted`."""
        # the carry of a loop is made in the trip before
        if eqn.primitive.name in ("scan", "while"):
            return self.marked(body, {})[0]
        results = zip(body.jaxpr.outvars, eqn.outvars, strict=False)
        wanted_results = {
            var: wanted[outvar]
            for var, outvar in results
            if outvar in wanted
            and compat.is_var(
                var,
            )
        }
        marked_body, wanted_inputs = self.marked(body, wanted_results)
        operands = eqn.invars[len(eqn.invars) - len(body.jaxpr.invars) :]
        for var, operand in zip(body.jaxpr.invars, operands, strict=False):
            if var in wanted_inputs and compat.is_var(operand):
                wanted[operand] = wanted_inputs[var]
        return marked_body
