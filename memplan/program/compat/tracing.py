"""Arrays, keys and traces: what jax knows of values, and what it traced of a function."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax._src import api as _api
from jax._src import core as _core
from jax._src import traceback_util as _traceback_util
from jax._src.lax import lax as _lax
from jax._src.named_sharding import UnspecifiedValue as _UnspecifiedValue
from jax.experimental.layout import Layout, with_layout_constraint


def hide_frames(folder: str) -> None:
    """Leave the frames of these files out of tracebacks, wherever jax leaves out its own."""
    _traceback_util.register_exclusion(folder)


def is_tracing() -> bool:
    """True inside another jit, scan, grad or vmap."""
    return not _core.trace_state_clean()


def transform_of(values: Sequence[Any]) -> str | None:
    """Name of a differentiating or batching trace among the values ('grad', 'vmap'), else None."""
    for value in values:
        if isinstance(value, _core.Tracer):
            name = type(value).__name__
            if "JVP" in name or "Linearize" in name:
                return "grad"
            if "Batch" in name:
                return "vmap"
    return None


def placement_of(array: Any, any_memory: bool = False) -> Any:
    """The sharding that an array or a shape is committed to; None where it is free, or where jax puts it anyway.

    Args:
      any_memory: host memory is as good as the device's.
    """
    sharding = getattr(array, "sharding", None)
    if sharding is None or (isinstance(array, jax.Array) and not array.committed):
        return None
    if sharding.num_devices > 1:  # of an abstract mesh jax tells nothing else
        return sharding.with_memory_kind(None) if any_memory else sharding
    return _unless_usual(sharding, any_memory)


@functools.lru_cache(maxsize=1024)
def _unless_usual(sharding: Any, any_memory: bool) -> Any:
    usual = jax.local_devices()[0]
    kind = usual.default_memory().kind
    found = sharding.with_memory_kind(kind) if any_memory else sharding
    return None if found.device_set == {usual} and found.memory_kind in (None, kind) else found


def donated_inputs(traced: Any) -> tuple[bool, ...]:
    """One flag per leaf of the dynamic arguments of what `jax.jit(...).trace(...)` returned."""
    return tuple(traced._params["donated_invars"])


def argument_structures(traced: Any) -> tuple[Any, ...]:
    """Structures of the positional, dynamic arguments; `Traced.in_tree` needs `has_args_info`."""
    by_position, _ = traced._in_tree.children()
    return tuple(by_position.children())


def in_tree_of(traced: Any) -> Any:
    """The structure of (args, kwargs), without the static ones; likewise."""
    return traced._in_tree


def jit_options_of(jitted: Any) -> dict[str, Any]:
    """The options that `jax.jit` was given, of what it returned."""
    info = jitted._jit_info
    names = ("static_argnums", "static_argnames", "donate_argnums", "donate_argnames", "keep_unused")
    options = {name: given for name in names if (given := getattr(info, name))}
    for name in ("in_shardings", "out_shardings"):
        leaves = getattr(info, f"{name}_leaves")
        if not all(isinstance(leaf, _UnspecifiedValue) for leaf in leaves):
            options[name] = getattr(info, f"{name}_treedef").unflatten(leaves)
    return options


def has_args_info(traced: Any) -> bool:
    """May jax put its descriptions of leaves into the containers of the arguments? Some check what they are given."""
    try:
        return traced.args_info is not None
    except Exception:
        return False


@contextlib.contextmanager
def differentiated_as(change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Inside the block, `jax.grad` and `jax.value_and_grad` differentiate `change(function)`.

    Both releases look `vjp` up in jax._src.api when the gradient is traced.
    """
    plain = _api.vjp

    def changed(function: Any, *primals: Any, **options: Any) -> Any:
        return plain(change(function), *primals, **options)

    _api.vjp = changed  # type: ignore[assignment]
    try:
        yield
    finally:
        _api.vjp = plain


def is_key(leaf: Any) -> bool:
    """True for typed random keys (`jax.random.key`), arrays and shapes alike."""
    return hasattr(leaf, "dtype") and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def key_impl_of(dtype: Any) -> str:
    """The generator's name, as `jax.random.wrap_key_data(impl=...)` takes it; jax.random.key_impl wants an array."""
    return dtype._impl.name


def draws_by_itself(atom: Any) -> bool:
    """True for what is no array of keys, and for keys of threefry: drawing from many is drawing from each.

    The other generators draw for a whole batch from its first key (`jax.random`: "vmap over rbg keys").
    """
    dtype = atom.aval.dtype
    return not jax.numpy.issubdtype(dtype, jax.dtypes.prng_key) or key_impl_of(dtype) == "threefry2x32"


def empty(shape: Sequence[int], dtype: Any, space: Any) -> Any:
    """An array in a `jax.memory.Space` that nothing was written to."""
    return jax.lax.broadcast(_lax.empty2(dtype, memory_space=space), shape)


def in_order(array: Any) -> Any:
    """The array, which XLA may lay out in no other order than that of its dimensions."""
    if not array.ndim or is_key(array):
        return array
    return with_layout_constraint(array, Layout(tuple(range(array.ndim))))
