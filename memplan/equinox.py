"""`equinox.filter_jit` with a device-memory budget."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, Protocol, Unpack, overload

import jax
import numpy as np

from memplan.api import StepOptions, refuse_no_function, refuse_unknown
from memplan.errors import UnsupportedProgramError
from memplan.libraries import LibraryJit, PlainStep, planned_instead, unwrapped
from memplan.program import compat
from memplan.stages import Planned
from memplan.units import Size

try:
    import equinox
except ModuleNotFoundError as error:
    raise ImportError("memplan.equinox needs Equinox: pip install 'memplan[equinox]'.") from error

_WRAPPER: type[Any] = type(equinox.filter_jit(len))

__all__ = ["FilterJit", "filter_jit"]

Donate = Literal["all", "all-except-first", "warn", "warn-except-first", "none"]


class Decorator(Protocol):
    """`filter_jit` with its options: makes a planned step of a function."""

    def __call__[**P, R](self, fun: Callable[P, R], /) -> FilterJit[P, R]: ...


@overload
def filter_jit[**P, R](
    fun: Callable[P, R],
    *,
    donate: Donate = "none",
    budget: Size = None,
    **options: Unpack[StepOptions],
) -> FilterJit[P, R]: ...
@overload
def filter_jit(
    *,
    donate: Donate = "none",
    budget: Size = None,
    **options: Unpack[StepOptions],
) -> Decorator: ...
def filter_jit(
    fun: Callable[..., Any] | None = None,
    *,
    donate: Donate = "none",
    budget: Size = None,
    **options: Unpack[StepOptions],
) -> Any:
    """`equinox.filter_jit` with a device-memory budget.

    Arrays are traced. Everything else is static, and compared by equality.

    Args:
      fun: a function, method or module; omit it to use `filter_jit` as a decorator with arguments.
      donate: as for `equinox.filter_jit`.
      budget: as for `memplan.jit`.
      options: `host_budget`, `device`, `planner`, `plan`, `verify`, `split`, `topology`,
        `between_hosts`, `pin`, `keep_unused` and `compiler_options`, as for `memplan.jit`.

    Returns:
      A callable like `equinox.filter_jit`'s, with `plan(*args, **kwargs)`, `lower` and `report`.

    Raises:
      BudgetError, UnknownDeviceError: at once, if the request is invalid.
      InfeasibleBudgetError: when the function is called or planned, if no plan fits.

    Example:
      >>> import equinox, jax, jax.numpy as jnp, memplan
      >>> model = equinox.nn.Linear(4, 2, key=jax.random.key(0))
      >>> step = memplan.equinox.filter_jit(lambda model, x: model(x).sum(), budget="1MiB")
      >>> step(model, jnp.ones(4)).shape
      ()
    """
    if fun is None:
        return functools.partial(filter_jit, donate=donate, budget=budget, **options)
    refuse_no_function("memplan.equinox.filter_jit", fun)
    refuse_unknown("memplan.equinox.filter_jit", StepOptions, options)
    jitted: Any = equinox.filter_jit(fun, donate=donate)
    planned = planned_instead(jitted._cached, budget, options)
    return FilterJit(fun, dataclasses.replace(jitted, _cached=planned), planned)


class FilterJit[**P, R](LibraryJit[P, R]):
    """The result of `equinox.filter_jit`, whose inner `jax.jit` is memplan's."""

    def plan(self, /, *args: Any, **kwargs: Any) -> Planned[R]:
        """Plan for arguments with arrays or `jax.ShapeDtypeStruct`s as leaves; runs nothing."""
        return super().plan(*jax.tree.map(_as_array, args), **jax.tree.map(_as_array, kwargs))


def plain_step(step: Any, args: tuple[Any, ...]) -> PlainStep | None:
    """The step inside a `filter_jit`, Equinox' or memplan's, as a function of its arrays.

    What is no array is part of the step. Arguments keep their positions; arrays of a module that
    is itself the step are one more argument.

    Returns:
      None if the step is neither.
    """
    jitted, planned = unwrapped(step)
    if not isinstance(jitted, _WRAPPER):
        return None
    function = jitted.__wrapped__
    arrays, static = equinox.partition((*args, function), _is_traced)

    def plain(*arrays: Any) -> Any:
        *args, function = equinox.combine(arrays, static)
        return equinox.filter(function(*args), equinox.is_array)

    plain.__name__ = getattr(function, "__name__", type(function).__name__)
    inner = compat.jit_options_of(planned._jitted if planned else jitted._cached)
    # Its positions are those of Equinox' own arguments.
    options = {name: inner[name] for name in ("keep_unused", "compiler_options") if name in inner}
    donated = [jitted.donate_first, *[jitted.donate_rest] * len(args)]
    options["donate_argnums"] = tuple(
        position for position, is_donated in enumerate(donated) if is_donated
    )
    return PlainStep(plain, arrays, options, planned._request if planned else None)


def _is_traced(leaf: Any) -> bool:
    return equinox.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


def _as_array(leaf: Any) -> Any:
    """Convert a shape to an array that takes no memory; return other leaves unchanged.

    Equinox would treat a shape as static.

    Raises:
      UnsupportedProgramError: the shape is divided over devices.
    """
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if leaf.sharding is not None and leaf.sharding.num_devices > 1:
        raise UnsupportedProgramError(
            "memplan.equinox.filter_jit plans for shapes on one device. Pass arrays on the mesh, "
            "or "
            "use memplan.jit with equinox.partition."
        )
    if compat.is_key(leaf):
        key = jax.random.key(0, impl=compat.key_impl_of(leaf.dtype))
        return jax.numpy.broadcast_to(key, leaf.shape)
    return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)
