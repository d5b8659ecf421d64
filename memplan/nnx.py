"""`flax.nnx.jit` with a device-memory budget."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Unpack

from flax import nnx

from memplan.api import JitOptions, StepOptions, refuse_no_function, refuse_unknown
from memplan.libraries import LibraryJit, planned_instead
from memplan.units import Size

__all__ = ["NnxJit", "jit"]

_OURS = (*StepOptions.__annotations__, "host_state")  # the others are those of `nnx.jit`


def jit(
    fun: Callable[..., Any] | None = None,
    *,
    budget: Size = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
    **options: Unpack[JitOptions],
) -> Any:
    """`flax.nnx.jit` with a device-memory budget: modules, optimizers, metrics and rngs are changed in place.

    Args:
      fun: the function; left out where this is used as a decorator with arguments.
      graph, graph_updates: as for `flax.nnx.jit`; `graph=False` takes modules as trees.
      budget, options: as for `memplan.jit`. With `host_state`, what `Planned.place` returns stays in host memory.

    Returns:
      A callable like `flax.nnx.jit`'s, with `plan(*args, **kwargs)`, `lower`, `trace`, `eval_shape` and `report`.

    Raises:
      BudgetError, UnknownDeviceError: at once, where the request makes no sense.
      InfeasibleBudgetError: when called or planned, where no plan fits.
    """
    if fun is None:
        return functools.partial(jit, budget=budget, graph=graph, graph_updates=graph_updates, **options)
    refuse_no_function("memplan.nnx.jit", fun)
    refuse_unknown("memplan.nnx.jit", JitOptions, options)
    given: dict[str, Any] = {**options}
    ours = {name: given.pop(name) for name in _OURS if name in given}
    jitted: Any = nnx.jit(fun, graph=graph, graph_updates=graph_updates, **given)
    planned = jitted.jitted_fn = planned_instead(jitted.jitted_fn, budget, ours)
    return NnxJit(fun, jitted, planned)


class NnxJit(LibraryJit):
    """What `flax.nnx.jit` returns, with memplan inside."""

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """As `flax.nnx.jit(...).trace`; its `lower` plans."""
        return self._jitted.trace(*args, **kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """As `flax.nnx.jit(...).eval_shape`."""
        return self._jitted.eval_shape(*args, **kwargs)
