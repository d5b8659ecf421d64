"""Names that the user gave to values -> marks that XLA's modules keep.

jax lowers `checkpoint_name` to nothing: the value is there, its name is not. The scope of an equation's name stack does
go into the module, and XLA keeps it with the instruction through all its passes.
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
    """Raise MemplanError for a name that no value has, UnsupportedProgramError for one that the step computes again."""
    named = dict[str, list[tuple[str, bool]]]()
    for name, source, again in _names(closed, False):
        named.setdefault(name, []).append((source, again))
    for pin in pins:
        if pin.name not in named:
            there = f"it names {', '.join(map(repr, sorted(named)))}" if named else "it names none"
            raise MemplanError(
                f"pin: no value of the step is named {pin.name!r} by jax.ad_checkpoint.checkpoint_name; {there}."
            )
        by_step = [source for source, again in named[pin.name] if again]
        if by_step and pin.where is not Where.RECOMPUTE:
            raise UnsupportedProgramError(
                f"pin: the step's own jax.checkpoint computes {pin.name!r} again ({compat.relative(by_step[0])}), and "
                "memplan carries that out as it is written. Let its policy save the name, or remove the checkpoint."
            )


def _names(closed: compat.ClosedJaxpr, again: bool) -> Iterator[tuple[str, str, bool]]:
    """Every name, its `file:line`, and: does a `jax.checkpoint` compute the value a second time there?"""
    for eqn in closed.jaxpr.eqns:
        if eqn.primitive.name == "name":
            yield eqn.params["name"], compat.source_of(eqn), again or compat.recomputes(eqn)
        for body in compat.sub_jaxprs(eqn):
            yield from _names(body, again or compat.recomputes(eqn))


def own_checkpoints(closed: compat.ClosedJaxpr) -> list[str]:
    """`file:line` of each differentiated `jax.checkpoint` of a step."""
    found = dict[str, None]()
    for eqn in closed.jaxpr.eqns:
        if compat.recomputes(eqn):
            found[compat.relative(compat.source_of(eqn))] = None
        else:
            found.update(dict.fromkeys(one for body in compat.sub_jaxprs(eqn) for one in own_checkpoints(body)))
    return [source for source in found if source]


def pin_of(eqn: compat.JaxprEqn, pins: Sequence[Pin]) -> Pin | None:
    """The pin whose mark an equation carries, unless it only computes the value again."""
    found = None if compat.recomputes(eqn) else MARK.search(compat.scope_of(eqn))
    return pins[int(found[1])] if found else None


def marked(closed: compat.ClosedJaxpr, pins: Sequence[Pin]) -> compat.ClosedJaxpr:
    """The same equations; those that make a value with the name of a pin carry its mark."""
    return _Marker({pin.name: number for number, pin in enumerate(pins)}).marked(closed, {})[0]


@dataclass(frozen=True)
class _Marker:
    numbers: Mapping[str, int]  # of the pins, by name

    def marked(self, closed: compat.ClosedJaxpr, wanted: _Wanted) -> tuple[compat.ClosedJaxpr, _Wanted]:
        """The jaxpr with marks, and those of its inputs for whoever makes them.

        Args:
          wanted: variables that have marks outside.
        """
        wanted, eqns = dict(wanted), list[compat.JaxprEqn]()
        named = (eqn for eqn in closed.jaxpr.eqns if eqn.primitive.name == "name")
        names: dict[Any, str] = {eqn.outvars[0]: eqn.params["name"] for eqn in named}
        for eqn in reversed(closed.jaxpr.eqns):
            made = [wanted[var] for var in eqn.outvars if var in wanted]
            kept_by_checkpoint = eqn.primitive.name == "reduce_precision"  # the form of a value that its policy saves
            if kept_by_checkpoint and (number := self.numbers.get(names.get(eqn.invars[0], ""))) is not None:
                made.append(number)
            if compat.recomputes(eqn):
                pass
            elif eqn.primitive.name == "name":
                number = self.numbers.get(eqn.params["name"], next(iter(made), None))
                if number is not None and compat.is_var(eqn.invars[0]):
                    wanted[eqn.invars[0]] = number
                    eqn = compat.in_scope(eqn, f"{_SCOPE}{number}")
            elif bodies := compat.sub_jaxprs(eqn):
                eqn = compat.with_jaxprs(eqn, [self._inside(eqn, body, wanted) for body in bodies])
            elif made:
                eqn = compat.in_scope(eqn, f"{_SCOPE}{min(made)}")
            eqns.append(eqn)
        return compat.with_eqns(closed, eqns[::-1]), wanted

    def _inside(self, eqn: compat.JaxprEqn, body: compat.ClosedJaxpr, wanted: dict[Any, int]) -> compat.ClosedJaxpr:
        """A computation of an equation; what it wants of its inputs is added."""
        if eqn.primitive.name in ("scan", "while"):  # what they carry is made in the trip before
            return self.marked(body, {})[0]
        results = zip(body.jaxpr.outvars, eqn.outvars, strict=False)
        outside = {var: wanted[one] for var, one in results if one in wanted and compat.is_var(var)}
        found, inner = self.marked(body, outside)
        operands = eqn.invars[len(eqn.invars) - len(body.jaxpr.invars) :]
        for var, operand in zip(body.jaxpr.invars, operands, strict=False):
            if var in inner and compat.is_var(operand):
                wanted[operand] = inner[var]
        return found
