"""What a factory may return as its step: a function, or the result of any jit that memplan plans."""

import sys
from typing import Any

import memplan
from memplan.libraries import PlainStep
from memplan.program import compat
from memplan.stages import PlannedJit

# Packages, and the module of memplan that knows their steps. It is loaded only after the package,
# by the factory, since a step of a package that is not loaded cannot be there.
_LIBRARIES = {"equinox": "equinox", "flax.nnx": "nnx", "keras": "keras"}


def plain_step(step: Any, args: tuple[Any, ...]) -> PlainStep:
    """The plain step inside a step of any library, with the options of its jit.

    A function that is in no jit has no options, not even `donate_argnums`.
    """
    if isinstance(step, PlannedJit):
        return PlainStep.inside(step._jitted, args, step._request)
    if compat.is_jitted(step):
        return PlainStep.inside(step, args)
    for package, module in _LIBRARIES.items():
        if package in sys.modules:
            plain = getattr(memplan, module).plain_step(step, args)
            if plain is not None:
                return plain
    return PlainStep(step, args, {})
