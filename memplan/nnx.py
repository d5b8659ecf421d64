"""`flax.nnx.jit` with a device-memory budget."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol, Unpack, overload

from flax import nnx

from memplan.api import JitOptions, StepOptions, refuse_no_function, refuse_unknown
from memplan.libraries import LibraryJit, PlainStep, planned_instead, unwrapped
from memplan.units import Size

__all__ = ["NnxJit", "jit"]

# Options of memplan; the others are options of `nnx.jit`.
_PLAN_OPTIONS = (*StepOptions.__annotations__, "host_state")
_WRAPPERS = tuple({type(nnx.jit(len, graph_updates=updates)) for updates in (True, False)})


class Decorator(Protocol):
    """`jit` with its options: makes a planned step of a function."""

    def __call__[**P, R](self, fun: Callable[P, R], /) -> NnxJit[P, R]: ...


@overload
def jit[**P, R](
    fun: Callable[P, R],
    *,
    graph: bool | None = None,
    graph_updates: bool | None = None,
    budget: Size = None,
    **options: Unpack[JitOptions],
) -> NnxJit[P, R]: ...
@overload
def jit(
    *,
    graph: bool | None = None,
    graph_updates: bool | None = None,
    budget: Size = None,
    **options: Unpack[JitOptions],
) -> Decorator: ...
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

    Example:
      >>> import jax.numpy as jnp, memplan
      >>> from flax import nnx
      >>> model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
      >>> step = memplan.nnx.jit(lambda model, x: model(x).sum(), budget="1MiB")
      >>> step(model, jnp.ones((3, 4))).shape
      ()
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


class NnxJit[**P, R](LibraryJit[P, R]):
    """The result of `flax.nnx.jit`, whose inner `jax.jit` is memplan's."""

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """Like `flax.nnx.jit(...).trace`; its `lower` plans."""
        return self._jitted.trace(*args, **kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Like `flax.nnx.jit(...).eval_shape`."""
        return self._jitted.eval_shape(*args, **kwargs)


def plain_step(step: Any, args: tuple[Any, ...]) -> PlainStep | None:
    """The step inside an `nnx.jit`, Flax' or memplan's, as a function of arrays.

    Returns:
      None if the step is neither.
    """
    wrapper, planned = unwrapped(step)
    if not isinstance(wrapper, _WRAPPERS):
        return None
    pure_args = _inside(wrapper, args, lambda *pure_args: pure_args)
    if planned is None:
        plain = PlainStep.inside(wrapper.jitted_fn, pure_args)
    else:
        plain = PlainStep.inside(planned._jitted, pure_args, planned._request)

    @functools.wraps(plain.function)
    def function(*arrays: Any) -> Any:
        return _inside(wrapper, args, lambda *_: plain.function(*arrays))

    return dataclasses.replace(plain, function=function)


def _inside(wrapper: Any, args: tuple[Any, ...], call: Callable[..., Any]) -> Any:
    """`call(*pure_args)`, where `wrapper` lowers its `jax.jit`: only there can Flax merge modules.

    Args:
      wrapper: the result of `nnx.jit`.
      args: its arguments; `pure_args` are these as trees of arrays.
    """
    results = []
    jitted, wrapper.jitted_fn = wrapper.jitted_fn, _Lowering(call, results)
    try:
        wrapper.lower(*args)
    finally:
        wrapper.jitted_fn = jitted
    return results[0]


class _Lowering:
    """Stands in for a `jax.jit`: its `lower` appends what `call` returns to `results`."""

    def __init__(self, call: Callable[..., Any], results: list[Any]):
        self._call = call
        self._results = results

    def lower(self, *pure_args: Any) -> None:
        self._results.append(self._call(*pure_args))
