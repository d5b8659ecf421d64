"""Flattening: the same inputs and lines without calls and dead equations; mutable arrays from outside are refused."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from memplan.errors import UnsupportedProgramError
from memplan.program import compat
from memplan.program.flat import Flat, flatten
from memplan.program.trace import trace
from tests.program.steps import CASES, X, traced

CALLS = {
    "jit",
    "pjit",
    "custom_jvp_call",
    "custom_vjp_call",
    "closed_call",
    "remat2",
    "checkpoint",
    "core_call",
}


@pytest.mark.parametrize("name", CASES)
def test_inputs_stay_and_calls_go(name: str) -> None:
    program = traced(CASES[name])
    before, after = program.traced.jaxpr.jaxpr, program.jaxpr.jaxpr
    assert [var.aval for var in before.invars] == [var.aval for var in after.invars]
    assert len(program.donated) == len(after.invars)
    if name != "inner sharding":  # a call with shardings of its own says something
        assert not CALLS & {eqn.primitive.name for eqn in after.eqns}


@pytest.mark.parametrize(
    "name", [name for name in CASES if name not in ("checkpoint", "loop gradient")]
)
def test_every_operation_has_a_line(name: str) -> None:
    sources = [compat.source_of(eqn) for eqn in traced(CASES[name]).jaxpr.jaxpr.eqns]
    assert all("tests/program/steps.py:" in source for source in sources)


def test_a_gradient_taken_outside_has_the_lines_inside() -> None:
    def step(x: jax.Array) -> Any:
        return jax.value_and_grad(
            lambda x: jnp.where(x > 0, jax.nn.gelu(x), jnp.linalg.norm(x)).sum()
        )(x)

    jax.clear_caches()  # jax keeps what it traced of gelu, with the lines of its first caller
    sources = [
        compat.source_of(eqn) for eqn in trace(step, (jnp.asarray(X),), {}, {}).jaxpr.jaxpr.eqns
    ]
    assert sources
    assert all("test_flatten.py:" in source for source in sources)


def test_the_body_of_a_librarys_loop_has_the_line_that_calls_the_library() -> None:
    """Of a body, jax tells the lines within."""
    library: dict[str, Any] = {}
    body = "lambda c, _: (jax.jit(jax.numpy.sin)(c) * 2, None)"
    text = f"import jax\ndef run(x): return jax.lax.scan({body}, x, length=3)[0]"
    exec(compile(text, "/usr/lib/python3.12/site-packages/library.py", "exec"), library)
    flat = Flat(flatten(jax.make_jaxpr(lambda x: library["run"](x))(1.0)))
    (loop,) = (number for number, eqn in enumerate(flat.eqns) if compat.scan_of(eqn))
    sources = [compat.source_of(eqn) for eqn in flat.inner(loop, 0).eqns]
    assert len(sources) == 2 and all("test_flatten.py:" in source for source in sources)


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


def test_a_mutable_argument_is_refused_with_its_name() -> None:
    def step(buffer: Any) -> Any:
        return buffer[...] + 1

    program = trace(step, (jax.new_ref(jnp.ones(3)),), {}, {})
    with pytest.raises(UnsupportedProgramError, match=r"argument buffer .*jax\.new_ref"):
        program.jaxpr  # noqa: B018 - made when first asked for


def test_a_mutable_constant_is_refused() -> None:
    reference = jax.new_ref(jnp.ones(3))
    program = trace(lambda x: reference[...] + x, (jnp.ones(3),), {}, {})
    with pytest.raises(UnsupportedProgramError, match="constant"):
        program.jaxpr  # noqa: B018


def names_of(closed: compat.ClosedJaxpr) -> list[str]:
    return [eqn.primitive.name for eqn in closed.jaxpr.eqns]


def test_calls_in_calls_are_inlined_with_their_constants() -> None:
    table = jnp.arange(3.0)

    @jax.jit
    def inner(x: jax.Array) -> jax.Array:
        return x * table

    closed = jax.make_jaxpr(jax.jit(lambda x: inner(inner(x)) + 1))(jnp.ones(3))
    flat = flatten(closed)
    assert names_of(closed) == ["jit"] and names_of(flat) == ["mul", "mul", "add"]
    assert compat.jaxpr_as_fun(flat)(jnp.ones(3))[0].tolist() == [1, 2, 5]


def test_calls_in_the_body_of_a_loop_stay() -> None:
    flat = flatten(jax.make_jaxpr(lambda x: jax.lax.map(jax.jit(jnp.sin), x))(jnp.ones(3)))
    (loop,) = flat.jaxpr.eqns
    assert names_of(compat.sub_jaxprs(loop)[0]) == ["jit"]


def test_an_input_that_nothing_reads_stays() -> None:
    flat = flatten(jax.make_jaxpr(lambda x, y: (jnp.sin(y), x + 1)[1])(1.0, 2.0))
    assert names_of(flat) == ["add"] and len(flat.jaxpr.invars) == 2


def test_a_reference_made_inside_becomes_values() -> None:
    def step(x: jax.Array) -> jax.Array:
        ref = jax.new_ref(x)
        ref[0] = 7.0
        return ref[...]

    flat = flatten(jax.make_jaxpr(step)(jnp.ones(3)))
    assert not any(compat.is_reference(var) for eqn in flat.jaxpr.eqns for var in eqn.outvars)
    assert not any(eqn.effects for eqn in flat.jaxpr.eqns)
    assert compat.jaxpr_as_fun(flat)(jnp.ones(3))[0].tolist() == [7, 1, 1]
