"""Flattening: the same inputs, outputs and numbers, without calls; what is static, donated or weakly typed stays so."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memplan.errors import UnsupportedProgramError
from memplan.program import compat
from memplan.program.jit_arguments import dynamic_arguments, static_arguments
from memplan.program.trace import Program, as_step, trace
from tests.program.steps import CASES, Case, X

CALLS = {"jit", "pjit", "custom_jvp_call", "custom_vjp_call", "closed_call", "remat2", "checkpoint", "core_call"}


def traced(case: Case) -> Program:
    return trace(case.step, case.make(), case.kwargs, case.options)


def types(tree: Any) -> list[Any]:
    """Shape, dtype and weak type of every leaf."""
    avals = [jax.typeof(leaf) for leaf in jax.tree.leaves(tree)]
    return [(aval.shape, aval.dtype, aval.weak_type) for aval in avals]


def assert_same(expected: Any, found: Any) -> None:
    """Same tree, same types, and equal up to a rounding or two."""
    assert jax.tree.structure(expected) == jax.tree.structure(found)
    assert types(expected) == types(found)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        if jnp.issubdtype(jax.typeof(a).dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        elif jax.typeof(a).dtype == jax.dtypes.float0:
            continue
        np.testing.assert_allclose(np.asarray(a, np.complex64), np.asarray(b, np.complex64), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_the_flat_jaxpr_is_the_step(name: str) -> None:
    case = CASES[name]
    program = traced(case)
    same = as_step(program, program.jaxpr)
    expected = jax.jit(case.step, **case.options)(*case.make(), **case.kwargs)
    assert_same(expected, jax.jit(same, **case.options)(*case.make(), **case.kwargs))


@pytest.mark.parametrize("name", CASES)
def test_inputs_stay_and_calls_go(name: str) -> None:
    program = traced(CASES[name])
    before, after = program.traced.jaxpr.jaxpr, program.jaxpr.jaxpr
    assert [var.aval for var in before.invars] == [var.aval for var in after.invars]
    assert len(program.donated) == len(after.invars)
    if name != "inner sharding":  # a call with shardings of its own says something
        assert not CALLS & {eqn.primitive.name for eqn in after.eqns}


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("checkpoint", "loop gradient")])
def test_every_operation_has_a_line(name: str) -> None:
    sources = [compat.source_of(eqn) for eqn in traced(CASES[name]).jaxpr.jaxpr.eqns]
    assert all("tests/program/steps.py:" in source for source in sources)


def test_a_gradient_taken_outside_has_the_lines_inside() -> None:
    def step(x: jax.Array) -> Any:
        return jax.value_and_grad(lambda x: jnp.where(x > 0, jax.nn.gelu(x), jnp.linalg.norm(x)).sum())(x)

    sources = [compat.source_of(eqn) for eqn in trace(step, (jnp.asarray(X),), {}, {}).jaxpr.jaxpr.eqns]
    assert sources
    assert all("test_trace.py:" in source for source in sources)


def test_dead_equations_go_and_effects_stay() -> None:
    def step(x: jax.Array) -> jax.Array:
        jnp.linalg.norm(x)
        jax.debug.print("here {}", 1.0)
        return x + 1

    names = [eqn.primitive.name for eqn in trace(step, (jnp.asarray(X),), {}, {}).jaxpr.jaxpr.eqns]
    assert len(names) == 2
    assert names[1] == "add"


def test_a_differentiated_checkpoint_keeps_its_barrier() -> None:
    names = [eqn.primitive.name for eqn in traced(CASES["checkpoint"]).jaxpr.jaxpr.eqns]
    assert names.count("optimization_barrier") == 1


def test_names_are_paths_without_the_static_arguments() -> None:
    def step(mode: str, state: Any, x: Any, *rest: Any, k: Any) -> Any:
        return state["w"] * x + k + rest[0]

    program = trace(step, ("fast", {"w": 1.0, "b": 2.0}, 3.0, 4.0), {"k": 5.0}, {"static_argnums": 0})
    assert compat.input_names(program.traced.jaxpr) == ("state['b']", "state['w']", "x", "rest[0]", "k")


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "static" in name])
def test_the_dynamic_arguments_is_what_jax_takes(name: str) -> None:
    case = CASES[name]
    tree = jax.jit(case.step, **case.options).trace(*case.make(), **case.kwargs).in_tree
    assert jax.tree.structure(dynamic_arguments(case.step, case.make(), case.kwargs, case.options)) == tree
    assert static_arguments(case.step, case.make(), case.kwargs, case.options)


def test_static_values_are_kept_apart_from_each_other() -> None:
    def step(x: Any, n: int, *, mode: str = "a") -> Any:
        return x * n

    options = {"static_argnums": 1, "static_argnames": ("mode",)}
    assert static_arguments(step, (1.0, 2), {"mode": "b"}, options) == ((1, 2), ("mode", "b"))
    assert static_arguments(step, (1.0, 2), {}, options) != static_arguments(step, (1.0, 3), {}, options)
    assert static_arguments(step, (1.0, 2), {}, {}) == ()


def test_a_mutable_argument_is_refused_with_its_name() -> None:
    def step(buffer: Any) -> Any:
        return buffer[...] + 1

    program = trace(step, (jax.new_ref(jnp.ones(3)),), {}, {})
    with pytest.raises(UnsupportedProgramError, match=r"argument buffer .*jax\.new_ref"):
        program.jaxpr  # noqa: B018 - made when first asked for


def test_a_mutable_constant_is_refused() -> None:
    held = jax.new_ref(jnp.ones(3))
    program = trace(lambda x: held[...] + x, (jnp.ones(3),), {}, {})
    with pytest.raises(UnsupportedProgramError, match="constant"):
        program.jaxpr  # noqa: B018


def test_sizes_of_odd_types() -> None:
    sizes = {"bool": 9, "int4": 5, "int2": 3, "uint8": 9, "bfloat16": 18, "float8_e4m3fn": 9, "complex64": 72}
    for name, nbytes in sizes.items():
        assert compat.nbytes_of(jax.ShapeDtypeStruct((3, 3), jnp.dtype(name))) == nbytes
    assert compat.nbytes_of(jax.typeof(jax.random.key(0))) == 8
    assert compat.nbytes_of(jax.typeof(jax.random.split(jax.random.key(0, impl="rbg"), 3))) == 48
    assert compat.nbytes_of(jax.ShapeDtypeStruct((3,), jax.dtypes.float0)) == 0
