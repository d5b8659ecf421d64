"""One walk over equations: rules, parts of a jaxpr, what is known already, what nothing reads any more."""

import gc
import weakref
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memplan.program import compat
from memplan.program.interpret import bindings, interpret, interpret_eqns


def function(a: jax.Array, b: jax.Array) -> tuple[jax.Array, ...]:
    c = jnp.sin(a) * b
    return c + 1.0, b, jnp.cos(c)


CLOSED = jax.make_jaxpr(function)(1.0, 2.0)


def test_it_computes_what_the_function_does() -> None:
    np.testing.assert_allclose(
        interpret(CLOSED, (3.0, 4.0)), function(jnp.array(3.0), jnp.array(4.0))
    )


def test_a_rule_says_what_an_equation_does() -> None:
    def rule(eqn: compat.JaxprEqn, operands: list[Any]) -> list[Any]:
        return [0.0] if eqn.primitive.name == "sin" else compat.bind(eqn, operands)

    assert interpret(CLOSED, (3.0, 4.0), rule) == [1.0, 4.0, 1.0]


def test_what_is_known_stays_as_it_is() -> None:
    product = next(eqn.outvars[0] for eqn in CLOSED.jaxpr.eqns if eqn.primitive.name == "mul")
    bound = {**bindings(CLOSED, (3.0, 4.0)), product: 0.0}
    assert interpret_eqns(CLOSED.jaxpr.eqns, bound, CLOSED.jaxpr.outvars) == [1.0, 4.0, 1.0]


def test_a_part_of_a_jaxpr_needs_only_what_it_reads() -> None:
    (last,) = (eqn for eqn in CLOSED.jaxpr.eqns if eqn.primitive.name == "cos")
    (result,) = interpret_eqns([last], {last.invars[0]: 0.0}, last.outvars)
    assert result == 1.0
    with pytest.raises(KeyError):
        interpret_eqns([last], {}, last.outvars)


def test_equations_keep_their_lines_and_names() -> None:
    def named(x: jax.Array) -> jax.Array:
        with jax.named_scope("layer"):
            return jnp.sin(x)

    closed = jax.make_jaxpr(named)(1.0)
    (eqn,) = jax.make_jaxpr(lambda x: interpret(closed, [x]))(1.0).jaxpr.eqns
    assert compat.source_of(eqn) == compat.source_of(closed.jaxpr.eqns[0])
    assert str(eqn.source_info.name_stack) == "layer"


def test_a_value_that_nothing_reads_any_more_is_gone() -> None:
    class Number(float):  # a float knows no weak references
        pass

    references: list[weakref.ref[Number]] = []

    def rule(eqn: compat.JaxprEqn, operands: list[Any]) -> list[Number]:
        gc.collect()
        alive.append(sum(reference() is not None for reference in references))
        number = Number(0)
        references.append(weakref.ref(number))
        return [number]

    alive: list[int] = []
    chain = jax.make_jaxpr(lambda x: jnp.sin(jnp.sin(jnp.sin(jnp.sin(x)))))(1.0)
    interpret(chain, (1.0,), rule, nullcontext)
    assert alive == [0, 1, 1, 1]
