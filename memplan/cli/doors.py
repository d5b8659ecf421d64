"""What a factory may return as its step: a function, or the result of a jit that memplan knows."""

import sys
from typing import Any

import jax

import memplan
from memplan.cli.factory import FactoryError
from memplan.libraries import PlainStep
from memplan.program import compat
from memplan.stages import PlannedJit

# Packages, and the module of memplan that knows their steps. It is loaded only after the package,
# by the factory, since a step of a package that is not loaded cannot be there.
_LIBRARIES = {"equinox": "equinox", "flax.nnx": "nnx", "keras": "keras"}


def plain_step(step: Any, args: tuple[Any, ...]) -> PlainStep:
    """The plain step inside a step of any library, with the options of its jit.

    A function that is in no jit has no options, not even `donate_argnums`.

    Raises:
      FactoryError: a function or a step of `jax.jit` has functions in its arguments.
    """
    if isinstance(step, PlannedJit):
        return _without_functions(PlainStep.inside(step._jitted, args, step._request))
    if compat.is_jitted(step):
        return _without_functions(PlainStep.inside(step, args))
    for package, module in _LIBRARIES.items():
        if package in sys.modules:
            plain = getattr(memplan, module).plain_step(step, args)
            if plain is not None:
                return plain
    return _without_functions(PlainStep(step, args, {}))


def _without_functions(step: PlainStep) -> PlainStep:
    """The step, if its arguments have no functions in them."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(step.args):
        if callable(leaf):
            raise FactoryError(
                f"The argument args{jax.tree_util.keystr(path)} is a {type(leaf).__name__}, no "
                "array. If it is part of an Equinox module, return equinox.filter_jit(step) as the "
                "step; else name its argument in static_argnums of jax.jit, or close over it."
            )
    return step
