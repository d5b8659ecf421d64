"""`memplan.jit` in the place of `jax.jit` inside a library: what `memplan.equinox`, `nnx` and `keras` share."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

from memplan import api
from memplan.program import compat
from memplan.report.model import Report
from memplan.stages import Planned, PlannedJit
from memplan.units import Size


def planned_instead(jitted: Any, budget: Size, options: Mapping[str, Any]) -> PlannedJit:
    """What a library gave to `jax.jit`, and the options that it gave, given to `memplan.jit`.

    Args:
      jitted: what `jax.jit` returned.
    """
    return api.jit(jitted.__wrapped__, budget=budget, **{**compat.jit_options_of(jitted), **options})


class LibraryJit:
    """What a library's own jit returns, with memplan inside: all that it does, and `plan` and `report`."""

    def __init__(self, fun: Callable[..., Any], jitted: Any, planned: PlannedJit):
        functools.update_wrapper(self, fun, updated=())
        self._jitted = jitted
        self._planned = planned

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """A decorated method takes its instance as the first argument."""
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._jitted(*args, **kwargs)

    def plan(self, /, *args: Any, **kwargs: Any) -> Planned:
        """Plan for these arguments, with arrays or `jax.ShapeDtypeStruct`s in them; runs nothing."""
        return _PlannedInside(self._jitted.lower(*args, **kwargs))

    def lower(self, /, *args: Any, **kwargs: Any) -> Planned:
        """`plan`, by the name that the library has for this stage."""
        return self.plan(*args, **kwargs)

    @property
    def report(self) -> Report:
        """Of the plan so far; if there are several, for several shapes, of the one with the largest arguments.

        Raises:
          MemplanError: nothing was planned yet.
        """
        return self._planned.report


class _PlannedInside(Planned):
    """What a library lowered; compiled, it takes the library's arguments."""

    def __init__(self, lowered: Any):
        inside: Planned = lowered.lowered
        super().__init__(inside._found, inside._request)
        self._inside, self._library = inside, lowered

    @property
    def report(self) -> Report:
        return self._inside.report

    def compile(self, compiler_options: Mapping[str, Any] | None = None) -> Any:
        return self._library.compile(compiler_options)
