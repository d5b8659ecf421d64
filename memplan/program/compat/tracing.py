"""Arrays, keys and traces: facts of values and of traced functions that jax keeps to itself."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax._src import api as _api
from jax._src import core as _core
from jax._src import traceback_util as _traceback_util
from jax._src.lax import lax as _lax
from jax._src.lib import _jax as _jax_lib  # pyright: ignore[reportPrivateImportUsage]
from jax._src.named_sharding import UnspecifiedValue as _UnspecifiedValue
from jax.experimental.layout import Layout, with_layout_constraint

from memplan.program.compat.jaxprs import varying_axes


def hide_frames(folder: str) -> None:
    """Hide the frames of these files in tracebacks in which jax hides its own."""
    _traceback_util.register_exclusion(folder)


def is_tracing() -> bool:
    """True inside another jit, scan, grad or vmap."""
    return not _core.trace_state_clean()


def transform_of(values: Sequence[Any]) -> str | None:
    """'grad' or 'vmap' if a value is traced by a differentiating or batching trace, else None."""
    for value in values:
        if isinstance(value, _core.Tracer):
            name = type(value).__name__
            if "JVP" in name or "Linearize" in name:
                return "grad"
            if "Batch" in name:
                return "vmap"
    return None


def placement_of(array: Any, any_memory: bool = False) -> Any:
    """The sharding that an array or a shape is committed to.

    None if it is not committed, or if it is committed to the device that jax chooses by default.

    Args:
      any_memory: do not distinguish host memory from device memory.
    """
    sharding = getattr(array, "sharding", None)
    if sharding is None or (isinstance(array, jax.Array) and not array.committed):
        return None
    if sharding.num_devices > 1:  # the only fact that an abstract mesh has, too
        return sharding.with_memory_kind(None) if any_memory else sharding
    return _unless_default(sharding, any_memory)


@functools.lru_cache(maxsize=1024)
def _unless_default(sharding: Any, any_memory: bool) -> Any:
    device = jax.local_devices()[0]
    kind = device.default_memory().kind
    placement = sharding.with_memory_kind(kind) if any_memory else sharding
    is_default = placement.device_set == {device} and placement.memory_kind in (None, kind)
    return None if is_default else placement


def donated_inputs(traced: Any) -> tuple[bool, ...]:
    """Is each leaf of a traced step's dynamic arguments donated?"""
    return tuple(traced._params["donated_invars"])


def argument_structures(traced: Any) -> tuple[Any, ...]:
    """Structures of the positional, dynamic arguments (`Traced.in_tree` needs `has_args_info`)."""
    by_position, _ = traced._in_tree.children()
    return tuple(by_position.children())


def in_tree_of(traced: Any) -> Any:
    """The structure of (args, kwargs) without static arguments, by the same private attribute."""
    return traced._in_tree


def jit_options_of(jitted: Any) -> dict[str, Any]:
    """The options with which `jax.jit` returned this function."""
    info = jitted._jit_info
    names = (
        "static_argnums",
        "static_argnames",
        "donate_argnums",
        "donate_argnames",
        "keep_unused",
    )
    options = {name: option for name in names if (option := getattr(info, name))}
    for name in ("in_shardings", "out_shardings"):
        leaves = getattr(info, f"{name}_leaves")
        if not all(isinstance(leaf, _UnspecifiedValue) for leaf in leaves):
            options[name] = getattr(info, f"{name}_treedef").unflatten(leaves)
    if info.compiler_options_kvs:
        options["compiler_options"] = dict(info.compiler_options_kvs)
    return options


def is_jitted(function: Any) -> bool:
    """Did `jax.jit` return this function?"""
    return isinstance(function, _jax_lib.PjitFunction)


def has_args_info(traced: Any) -> bool:
    """Can jax put its descriptions of leaves into the containers of the arguments?

    Some containers check their contents and refuse.
    """
    try:
        return traced.args_info is not None
    except Exception:
        return False


@contextlib.contextmanager
def differentiated_as(change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Inside the block, `jax.grad` and `jax.value_and_grad` differentiate `change(function)`.

    jax 0.11 and 0.12 look up `vjp` in jax._src.api when they trace the gradient.
    """
    plain = _api.vjp

    def changed(function: Any, *primals: Any, **options: Any) -> Any:
        return plain(change(function), *primals, **options)

    with patched(_api, "vjp", changed):
        yield


@contextlib.contextmanager
def patched(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """Inside the block, a module or class of jax has another attribute of this name."""
    original = getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)


def is_key(leaf: Any) -> bool:
    """True for typed random keys (`jax.random.key`), arrays and shapes alike."""
    return hasattr(leaf, "dtype") and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def key_impl_of(dtype: Any) -> str:
    """The generator's name for `jax.random.wrap_key_data(impl=...)`.

    `jax.random.key_impl` needs an array.
    """
    return dtype._impl.name


def draws_by_itself(atom: Any) -> bool:
    """May an equation on this array be split along the array's dimensions?

    True for threefry keys, each of which draws independently, and for arrays of no keys. The other
    generators draw for a whole batch from its first key (`jax.random`: "vmap over rbg keys").
    """
    dtype = atom.aval.dtype
    is_key_array = jax.numpy.issubdtype(dtype, jax.dtypes.prng_key)
    return not is_key_array or key_impl_of(dtype) == "threefry2x32"


def empty(shape: Sequence[int], dtype: Any, space: Any) -> Any:
    """An uninitialized array in a `jax.memory.Space`."""
    return jax.lax.broadcast(_lax.empty2(dtype, memory_space=space), shape)


def empty_like(aval: Any, trips: int | None = None) -> Any:
    """An uninitialized array of a type, or a stack of such arrays, on the device.

    Inside a `shard_map`, it differs between devices as values of the type may.
    """
    shape = aval.shape if trips is None else (trips, *aval.shape)
    return varying_like(aval, empty(shape, aval.dtype, jax.memory.Space.Device))


def varying_like[T](aval: Any, arrays: T) -> T:
    """A tree of arrays that, inside a `shard_map`, differ between devices as a type's values may.

    Args:
      arrays: the same on all devices.
    """
    axes = tuple(sorted(varying_axes(aval)))
    if not axes:
        return arrays
    return jax.tree.map(lambda array: jax.lax.pcast(array, axes, to="varying"), arrays)


def in_order(array: Any) -> Any:
    """The array, with a constraint that XLA lays it out in the order of its dimensions."""
    if not array.ndim or is_key(array):
        return array
    return with_layout_constraint(array, Layout(tuple(range(array.ndim))))
