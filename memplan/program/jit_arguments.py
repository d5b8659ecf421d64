"""A step's arguments: which are static, and their types.

If `jax.jit` would refuse an argument, or lose a write into a Flax NNX module, the error says what
to do.
"""

import inspect
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax

from memplan.errors import UnsupportedProgramError
from memplan.program import compat

_NO_ARRAYS = (
    "memplan.jit takes arrays, as jax.jit does. Leave what is no array outside, or name it in "
    "static_argnums. A model with functions in it, such as Equinox', goes into "
    "memplan.equinox.filter_jit."
)
_SHAPES = (
    "Shapes (jax.ShapeDtypeStruct) are planned, not run: pass them to the method plan, and arrays "
    "to a call."
)


def explain(error: TypeError, dynamic: Any) -> None:
    """Add advice to the error that jax raises for arguments that are no arrays."""
    leaves = jax.tree.leaves(dynamic)
    if any(callable(leaf) or isinstance(leaf, (str, bytes)) for leaf in leaves):
        error.add_note(_NO_ARRAYS)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        error.add_note(_SHAPES)


def refuse_symbols(dynamic: Any) -> None:
    """Raise UnsupportedProgramError if an argument has a size without a number."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(dynamic):
        shape = getattr(leaf, "shape", ())
        if any(map(jax.export.is_symbolic_dim, shape)):
            raise UnsupportedProgramError(
                f"the argument {jax.tree_util.keystr(path[1:])} has the shape "
                f"({', '.join(map(str, shape))}), and memplan plans bytes, which symbols do not "
                "have. Plan for numbers, such as the largest shape that occurs: "
                "jax.ShapeDtypeStruct((4096, 64), ...); each other shape is a plan of its own. "
                "memplan.largest finds the largest that fits a budget."
            )


class NnxWrites:
    """The NNX variables in a step's (args, kwargs), with their values before the step ran."""

    def __init__(self, arguments: tuple[Any, Any]):
        # flax loads slowly; if the caller passes modules, it is loaded already
        nnx = sys.modules.get("flax.nnx")
        self._before: list[tuple[str, Any, list[Any]]] = []
        if nnx is None:
            return
        # no write into a State is lost: the step returns a module that it split
        ends = (nnx.Variable, nnx.State)
        nodes = jax.tree_util.tree_leaves_with_path(
            arguments,
            is_leaf=lambda node: isinstance(node, ends),
        )
        for path, node in nodes:
            if isinstance(node, nnx.Variable):
                self._before.append((jax.tree_util.keystr(path[1:]), node, jax.tree.leaves(node)))

    def check(self, results: Any) -> None:
        """Raise UnsupportedProgramError if the step wrote into a module and does not return it."""
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
        f"the step updates NNX modules that it does not return: {', '.join(names[:3])}{more} of "
        "its arguments. Unlike nnx.jit, memplan.jit (like jax.jit) returns only the results of the "
        "step, so these updates would be lost. memplan.nnx.jit keeps them. Or also return the "
        "modules (return model, optimizer, loss). Plan the function itself, not nnx.jit of it."
    )


def dynamic_arguments(
    step: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Mapping[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments without the static ones, as `jax.stages.Compiled` takes them."""
    positions, names = infer_static(step, len(args), options)
    return (
        tuple(arg for position, arg in enumerate(args) if position not in positions),
        {name: value for name, value in kwargs.items() if name not in names},
    )


def static_arguments(
    step: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Mapping[str, Any],
) -> tuple[tuple[int | str, Any], ...]:
    """The static arguments, each with its position or name: they are part of a program's cache key.

    Raises:
      TypeError: a static argument cannot be hashed.
    """
    positions, names = infer_static(step, len(args), options)
    arguments = (
        *((position, args[position]) for position in sorted(positions) if position < len(args)),
        *((name, kwargs[name]) for name in sorted(names) if name in kwargs),
    )
    try:
        hash(arguments)
    except TypeError as error:
        raise TypeError(
            f"a static argument cannot be compared with those of other calls ({error}). Pass a "
            "value that can be hashed, such as a tuple for a list, or an array that is not static."
        ) from None
    return arguments


def infer_static(
    step: Callable[..., Any],
    count: int,
    options: Mapping[str, Any],
) -> tuple[set[int], set[str]]:
    """Static positions among `count` arguments, and names.

    As in jax, if only positions or only names are given, the signature yields the others.
    """
    argnums, argnames = options.get("static_argnums"), options.get("static_argnames")
    if argnums is None and argnames is None:
        return set(), set()
    positions: set[int] = {argnums} if isinstance(argnums, int) else set(argnums or ())
    positions = {position + count if position < 0 else position for position in positions}
    names: set[str] = {argnames} if isinstance(argnames, str) else set(argnames or ())
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):
        return positions, names
    ordinary = {p.name: i for i, p in enumerate(parameters) if p.kind is p.POSITIONAL_OR_KEYWORD}
    if argnums is None:
        positions = {ordinary[name] for name in names if name in ordinary}
    elif argnames is None:
        names = {name for name, position in ordinary.items() if position in positions}
    return positions, names


def type_of(leaf: Any, any_memory: bool) -> Any:
    """The type of an argument, read from the cheapest attributes.

    Every call pays for it: 0.1 ms for 200 arrays.
    """
    aval = getattr(leaf, "aval", None)
    if aval is not None:
        placement = compat.placement_of(leaf, any_memory) if leaf.committed else None
        return aval.shape, aval.dtype, aval.weak_type, placement
    if isinstance(leaf, (bool, int, float, complex)):
        try:
            aval = jax.typeof(leaf)  # to jax.jit it is an array of weak type
        except OverflowError:
            return leaf  # jax raises an error that names the argument
        return aval.shape, aval.dtype, aval.weak_type, None
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        weak_type = getattr(leaf, "weak_type", False)
        return leaf.shape, leaf.dtype, weak_type, compat.placement_of(leaf, any_memory)
    return leaf if isinstance(leaf, Hashable) else type(leaf)  # no array: jax raises the error
