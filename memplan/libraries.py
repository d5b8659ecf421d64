"""`memplan.jit` in the place of a library's `jax.jit`, and the plain step inside either."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Concatenate, Self, overload

from memplan import api
from memplan.program import compat
from memplan.program.jit_arguments import infer_static
from memplan.report.model import Report
from memplan.request import Request
from memplan.stages import Planned, PlannedJit
from memplan.units import Size


def planned_instead(jitted: Any, budget: Size, options: Mapping[str, Any]) -> PlannedJit[..., Any]:
    """Plan the function that a library passed to `jax.jit`, with the library's options.

    Args:
      jitted: the result of `jax.jit`.
      budget, options: as for `memplan.jit`.
    """
    options = {**compat.jit_options_of(jitted), **options}
    return api.jit(jitted.__wrapped__, budget=budget, **options)


@dataclass(frozen=True)
class PlainStep:
    """A step as a function of arrays alone, taken out of the jit that it was returned by.

    Every command can plan it, whichever library made it.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]  # arrays or shapes; None in the place of what is static
    options: Mapping[str, Any]  # of `jax.jit`
    request: Request | None = None  # memplan's options; None if memplan did not plan it

    @classmethod
    def inside(
        cls, jitted: Any, args: tuple[Any, ...], request: Request | None = None
    ) -> PlainStep:
        """The step inside the result of `jax.jit`; its static arguments become part of it."""
        options = compat.jit_options_of(jitted)
        static, _ = infer_static(jitted.__wrapped__, len(args), options)
        for name in ("static_argnums", "static_argnames", "donate_argnames"):
            options.pop(name, None)  # jax has resolved the names of donated arguments
        options.setdefault("donate_argnums", ())
        if not static:
            return cls(jitted.__wrapped__, args, options, request)

        @functools.wraps(jitted.__wrapped__)
        def step(*arrays: Any) -> Any:
            return jitted.__wrapped__(
                *(args[n] if n in static else array for n, array in enumerate(arrays))
            )

        shardings = options.get("in_shardings")
        if isinstance(shardings, (tuple, list)):  # jax's has none for static arguments
            dynamic = iter(shardings)
            options["in_shardings"] = tuple(
                None if n in static else next(dynamic) for n in range(len(args))
            )
        arrays = tuple(None if n in static else arg for n, arg in enumerate(args))
        return cls(step, arrays, options, request)


class LibraryJit[**P, R]:
    """The result of a library's own jit, with `memplan.jit` inside; it can plan and report."""

    def __init__(self, fun: Callable[P, R], jitted: Any, planned: PlannedJit[..., Any]):
        functools.update_wrapper(self, fun, updated=())
        self._jitted = jitted
        self._planned = planned

    @overload
    def __get__(self, instance: None, owner: Any = None) -> Self: ...
    @overload
    def __get__[S, **Q](
        self: LibraryJit[Concatenate[S, Q], R], instance: S, owner: Any = None
    ) -> Callable[Q, R]: ...
    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Bind a decorated method to its instance."""
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._jitted(*args, **kwargs)

    def plan(self, /, *args: Any, **kwargs: Any) -> Planned[R]:
        """Plan for arguments with arrays or `jax.ShapeDtypeStruct`s as leaves; runs nothing."""
        return _PlannedInside(self._jitted.lower(*args, **kwargs))

    def lower(self, /, *args: Any, **kwargs: Any) -> Planned[R]:
        """The same as `plan`, by the library's name for this stage."""
        return self.plan(*args, **kwargs)

    @property
    def report(self) -> Report:
        """The report of the plan. Of several, for several shapes, the one with most input bytes.

        Raises:
          MemplanError: nothing was planned yet.
        """
        return self._planned.report


def unwrapped(step: Any) -> tuple[Any, PlannedJit[..., Any] | None]:
    """A library's own jit of a step, and memplan's inside it; None if it is the library's alone."""
    return (step._jitted, step._planned) if isinstance(step, LibraryJit) else (step, None)


class _PlannedInside[R](Planned[R]):
    """A step that a library lowered; once compiled, it takes the library's arguments."""

    def __init__(self, lowered: Any):
        planned: Planned[Any] = lowered.lowered
        super().__init__(planned._outcome, planned._request)
        self._planned = planned
        self._lowered_by_library = lowered

    @property
    def report(self) -> Report:
        return self._planned.report

    def compile(self, compiler_options: Mapping[str, Any] | None = None) -> Any:
        return self._lowered_by_library.compile(compiler_options)
