"""What is given to the compiler: shapes without arrays, and programs of the step's types."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memplan.compilation.compiler import Compiler, shapes_of
from memplan.compilation.limits import Limits
from memplan.errors import WrongProgramError
from memplan.program import compat
from memplan.program.trace import Program
from memplan.xla.target import Target
from tests.compilation.modules import CPU, InOrder, no_agreement
from tests.compilation.outcomes import PROGRAM


def compiler() -> Compiler:
    target = Target(CPU, described=False)
    return Compiler(target, Limits(1, 1), InOrder(), None, no_agreement, lambda *_: None)


def narrowed(program: Program) -> Program:
    """With another output type than the step's."""

    def narrow(*leaves: jax.Array) -> list[jax.Array]:
        return [leaf.astype(jnp.bfloat16) for leaf in compat.jaxpr_as_fun(program.jaxpr)(*leaves)]

    return replace(program, rewritten=jax.make_jaxpr(narrow)(*program.jaxpr.in_avals))


def test_a_transform_that_changes_a_type_is_refused() -> None:
    with pytest.raises(WrongProgramError, match="output types"):
        compiler().compile(narrowed(PROGRAM))


def test_shapes_keep_no_array_alive() -> None:
    array = jnp.ones((3, 2), jnp.bfloat16)
    alive = weakref.ref(array)
    args, kwargs = shapes_of([{"w": array}, 2.0], {"x": array})
    del array
    gc.collect()
    assert alive() is None
    assert args == ({"w": kwargs["x"]}, 2.0)
    assert (kwargs["x"].shape, kwargs["x"].dtype) == ((3, 2), jnp.bfloat16)


def test_shapes_trace_as_the_arrays_do() -> None:
    placed = jax.device_put(jnp.ones(3), jax.devices()[0])
    (weak, strong, committed, plain), _ = shapes_of(
        [jnp.asarray(2.0), jnp.float32(2), placed, np.ones(2)], {}
    )
    assert weak.weak_type and not strong.weak_type
    assert committed.sharding == placed.sharding and strong.sharding is None
    assert isinstance(plain, np.ndarray)
