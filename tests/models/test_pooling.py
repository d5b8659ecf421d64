import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.pooling import adaptive_average


def averaged(x, bins):
    """The oracle: per bin, the mean from the rounded-down start to the rounded-up end."""
    rows, columns = (
        [slice(i * n // k, -(-(i + 1) * n // k)) for i in range(k)]
        for n, k in zip(x.shape[1:3], bins, strict=True)
    )
    return np.stack(
        [np.stack([x[:, row, column].mean((1, 2)) for column in columns], 1) for row in rows], 1
    )


@pytest.mark.parametrize(
    ("size", "bins"),
    [
        ((12, 6), (6, 6)),
        ((13, 17), (6, 6)),
        ((14, 14), (4, 4)),
        ((3, 2), (4, 4)),
        ((1, 9), (6, 1)),
        ((5, 5), (5, 5)),
    ],
)
def test_bins_are_means_of_their_cells(size, bins, quick_jit):
    x = np.random.default_rng(0).normal(size=(2, *size, 3)).astype(np.float32)
    pooled = quick_jit(adaptive_average, static_argnums=1)(x, bins)
    assert pooled.shape == (2, *bins, 3)
    np.testing.assert_allclose(pooled, averaged(x, bins), rtol=1e-5, atol=1e-6)


def test_gradient_has_no_scatter_and_dtype_stays():
    x = jax.ShapeDtypeStruct((1, 7, 9, 2), jnp.bfloat16)
    assert jax.eval_shape(lambda x: adaptive_average(x, (2, 2)), x).dtype == jnp.bfloat16
    assert "scatter" not in str(
        jax.make_jaxpr(jax.grad(lambda x: adaptive_average(x, (2, 2)).sum()))(x)
    )
