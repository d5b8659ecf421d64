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

# Options of memplan; the others are options of `nnx.jit`.
_PLAN_OPTIONS = (*StepOptions.__annotations__, "host_state")


def jit(
    fun: Callable[..., Any] | None = None,
    *,
    budget: Size = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
    **options: Unpack[JitOptions],
) -> Any:
    """`flax.nnx.jit` with a device-memory budget.

    It updates modules, optimizers, metrics and rngs in place.

    Args:
      fun: the function; omit it to use `jit` as a decorator with arguments.
      graph, graph_updates: as for `flax.nnx.jit`; `graph=False` takes modules as trees.
      budget, options: as for `memplan.jit`. With `host_state`, what `Planned.place` returns stays
        in host memory.

    Returns:
      A callable like `flax.nnx.jit`'s, with `plan(*args, **kwargs)`, `lower`, `trace`,
      `eval_shape` and `report`.

    Raises:
      BudgetError, UnknownDeviceError: at once, if the request is invalid.
      InfeasibleBudgetError: when the function is called or planned, if no plan fits.
    """
    if fun is None:
        return functools.partial(
            jit, budget=budget, graph=graph, graph_updates=graph_updates, **options
        )
    refuse_no_function("memplan.nnx.jit", fun)
    refuse_unknown("memplan.nnx.jit", JitOptions, options)
    nnx_options: dict[str, Any] = {**options}
    plan_options = {name: nnx_options.pop(name) for name in _PLAN_OPTIONS if name in nnx_options}
    jitted: Any = nnx.jit(fun, graph=graph, graph_updates=graph_updates, **nnx_options)
    planned = planned_instead(jitted.jitted_fn, budget, plan_options)
    jitted.jitted_fn = planned
    return NnxJit(fun, jitted, planned)


class NnxJit(LibraryJit):
    """The result of `flax.nnx.jit`, whose inner `jax.jit` is memplan's."""

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """Like `flax.nnx.jit(...).trace`; its `lower` plans."""
        return self._jitted.trace(*args, **kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Like `flax.nnx.jit(...).eval_shape`."""
        return self._jitted.eval_shape(*args, **kwargs)
