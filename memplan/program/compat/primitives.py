"""Primitives of our own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
from jax.interpreters import mlir


def new_primitive(name: str, function: Callable[..., Any]) -> jex.Primitive:
    """A primitive that computes what a function of jax computes: one array, shaped and lowered as that is."""

    def typed(*avals: Any, **params: Any) -> Any:
        made = jax.eval_shape(lambda *operands: function(*operands, **params), *avals)
        return avals[0].update(shape=made.shape, dtype=made.dtype, weak_type=False)

    made = jex.Primitive(name)
    made.def_impl(function)
    made.def_abstract_eval(typed)
    mlir.register_lowering(made, mlir.lower_fun(function, multiple_results=False))
    return made
