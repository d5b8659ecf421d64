"""Arguments of a step: which are static, their types; help for those of Flax NNX and Equinox that `jax.jit` refuses."""

import inspect
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax

from memplan.errors import UnsupportedProgramError
from memplan.program import compat

_NO_ARRAYS = (
    "memplan.jit takes arrays, as jax.jit does. Leave what is no array outside, or name it in static_argnums. A model "
    "with functions in it, such as Equinox', goes into memplan.equinox.filter_jit."
)
_SHAPES = "Shapes (jax.ShapeDtypeStruct) are planned, not run: pass them to the method plan, and arrays to a call."


def explain(error: TypeError, dynamic: Any) -> None:
    """Add advice to jax's refusal of arguments that are no arrays."""
    leaves = jax.tree.leaves(dynamic)
    if any(callable(leaf) or isinstance(leaf, (str, bytes)) for leaf in leaves):
        error.add_note(_NO_ARRAYS)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        error.add_note(_SHAPES)


class NnxWrites:
    """Variables in NNX modules among a step's (args, kwargs), with their values before the step ran."""

    def __init__(self, arguments: tuple[Any, Any]):
        nnx = sys.modules.get("flax.nnx")  # flax loads slowly; if modules are passed, it is loaded already
        self._before: list[tuple[str, Any, list[Any]]] = []
        if nnx is None:
            return
        ends = (nnx.Variable, nnx.State)  # a module that was split is returned by the caller
        for path, node in jax.tree_util.tree_leaves_with_path(arguments, is_leaf=lambda node: isinstance(node, ends)):
            if isinstance(node, nnx.Variable):
                self._before.append((jax.tree_util.keystr(path[1:]), node, jax.tree.leaves(node)))

    def check(self, results: Any) -> None:
        """Raise UnsupportedProgramError if the step wrote into a module and does not return the written value."""
        if not self._before:
            return
        returned = set(map(id, jax.tree.leaves(results)))
        lost = [
            name
            for name, variable, before in self._before
            if not returned.union(map(id, before)).issuperset(map(id, jax.tree.leaves(variable)))
        ]
        if lost:
            raise _lost(lost)


def _lost(names: Sequence[str]) -> UnsupportedProgramError:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return UnsupportedProgramError(
        f"the step updates NNX modules that it does not return: {', '.join(names[:3])}{more} of its arguments. "
        "Unlike nnx.jit, memplan.jit (like jax.jit) returns only the results of the step, so these updates would be "
        "lost. memplan.nnx.jit keeps them. Or also return the modules (return model, optimizer, loss). Plan the "
        "function itself, not nnx.jit of it."
    )


def dynamic_arguments(
    step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], options: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments without the static ones, as `jax.stages.Compiled` takes them."""
    positions, names = infer_static(step, len(args), options)
    return (
        tuple(arg for position, arg in enumerate(args) if position not in positions),
        {name: value for name, value in kwargs.items() if name not in names},
    )


def static_arguments(
    step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], options: Mapping[str, Any]
) -> tuple[tuple[int | str, Any], ...]:
    """The static arguments, each with its position or name: another value makes another program.

    Raises:
      TypeError: one cannot be hashed.
    """
    positions, names = infer_static(step, len(args), options)
    found = (
        *((position, args[position]) for position in sorted(positions) if position < len(args)),
        *((name, kwargs[name]) for name in sorted(names) if name in kwargs),
    )
    try:
        hash(found)
    except TypeError as error:
        raise TypeError(
            f"a static argument cannot be compared with those of other calls ({error}). Pass a value that can be "
            "hashed, such as a tuple for a list, or an array that is not static."
        ) from None
    return found


def infer_static(step: Callable[..., Any], count: int, options: Mapping[str, Any]) -> tuple[set[int], set[str]]:
    """Static positions among `count` arguments, and names.

    As in jax, if one is not given it is inferred from the other by the signature.
    """
    numbers, words = options.get("static_argnums"), options.get("static_argnames")
    if numbers is None and words is None:
        return set(), set()
    positions: set[int] = {numbers} if isinstance(numbers, int) else set(numbers or ())
    positions = {position + count if position < 0 else position for position in positions}
    names: set[str] = {words} if isinstance(words, str) else set(words or ())
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):
        return positions, names
    ordinary = {p.name: i for i, p in enumerate(parameters) if p.kind is p.POSITIONAL_OR_KEYWORD}
    if numbers is None:
        positions = {ordinary[name] for name in names if name in ordinary}
    elif words is None:
        names = {name for name, position in ordinary.items() if position in positions}
    return positions, names


def type_of(leaf: Any, any_memory: bool) -> Any:
    """The type of an argument, by the quickest way: 200 arrays take 0.1 ms of every call."""
    aval = getattr(leaf, "aval", None)
    if aval is not None:
        place = compat.placement_of(leaf, any_memory) if leaf.committed else None
        return aval.shape, aval.dtype, aval.weak_type, place
    if isinstance(leaf, (bool, int, float, complex)):
        try:
            aval = jax.typeof(leaf)  # to jax.jit it is an array of weak type
        except OverflowError:
            return leaf  # jax names the argument when it traces
        return aval.shape, aval.dtype, aval.weak_type, None
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False), compat.placement_of(leaf, any_memory)
    return leaf if isinstance(leaf, Hashable) else type(leaf)  # no array: jax refuses it when it traces
