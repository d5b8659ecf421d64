"""A primitive of ours is its function, traced as one equation."""

import jax
import jax.numpy as jnp
import numpy as np

from memplan.program import compat

outer = compat.new_primitive("test_outer", lambda x, y, *, power: jnp.outer(x, y) ** power)


def test_it_is_one_equation_with_the_shape_of_its_function_and_computes_what_that_computes():
    x, y = jnp.arange(3.0), jnp.arange(2.0) + 1
    (eqn,) = jax.make_jaxpr(lambda x, y: outer.bind(x, y, power=2))(x, y).jaxpr.eqns
    assert eqn.primitive is outer and compat.aval_of(eqn.outvars[0]).shape == (3, 2)
    expected = np.outer(x, y) ** 2
    np.testing.assert_array_equal(outer.bind(x, y, power=2), expected)
    np.testing.assert_array_equal(jax.jit(lambda x, y: outer.bind(x, y, power=2))(x, y), expected)
