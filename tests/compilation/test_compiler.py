"""What a compiler keeps of a call, and when it asks for a profile; nothing is compiled."""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp

from memplan.compilation.compiler import Compiler, shapes_of
from memplan.compilation.limits import Limits
from memplan.hardware.catalog import local_cpu
from memplan.program.trace import trace
from memplan.xla.target import Target


def test_shapes_keep_no_array_alive() -> None:
    x = jnp.ones((2, 3), jnp.bfloat16)
    (kept, number), named = shapes_of((x, 3), {"y": {"z": x}})
    assert number == 3 and jax.tree.structure(named) == jax.tree.structure({"y": {"z": 0}})
    for shape in (kept, named["y"]["z"]):
        assert isinstance(shape, jax.ShapeDtypeStruct) and (shape.shape, shape.dtype) == (x.shape, x.dtype)


def test_types_that_are_weak_stay_so() -> None:
    (kept,), _ = shapes_of((jnp.asarray(2.0),), {})
    assert kept.weak_type


def test_a_step_without_links_needs_no_profile() -> None:
    target = Target(local_cpu(2, 2**33), described=False)
    never = cast(Any, None)
    compiler = Compiler(target, Limits(1, 0), (), {}, never, None, never, never)
    assert compiler.profile(trace(lambda x: x, (jnp.ones(2),), {}, {})) is None
