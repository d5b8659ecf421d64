"""Rewrites modules that XLA compiles, before it schedules them."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax
from jax.extend import xla
from jaxlib import _jax, _xla

from memplan.xla.module import Module
from memplan.xla.serialize import serialize

Rewrite = Callable[[Module], Module]

_current: list[tuple[Rewrite, list[Module], list[Exception]]] = []


@contextmanager
def before_scheduling(platform: str, rewrite: Rewrite) -> Iterator[list[Module]]:
    """While this lasts, modules are rewritten; what they become is in the list. Of "cuda" once a GPU is described."""
    _register(platform)
    jax.clear_caches()
    _current.append((rewrite, [], []))
    try:
        yield _current[-1][1]
    finally:
        *_, errors = _current.pop()
        for error in errors:
            raise error


@functools.cache
def _register(platform: str) -> None:
    stage = xla.PipelineStage.PRE_SCHEDULER
    if platform == "cpu":
        xla.register_hlo_module_transformation(_called, name="tests", stage=stage, platforms="cpu")
    else:
        _xla.register_xla_transform_c_api(
            _jax.get_pjrt_plugin(platform), "tests", stage.value, _called
        )


def _called(proto: bytes) -> bytes | None:
    if not _current:
        return None
    rewrite, modules, errors = _current[-1]
    try:
        plain = Module.read(proto, scheduled=False)
        modules.append(rewrite(plain))
        if modules[-1] is plain:
            return None
        return serialize(modules[-1])
    except Exception as error:  # XLA knows none
        errors.append(error)
        return None
