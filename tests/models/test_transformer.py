from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.transformer import Decoder, DecoderConfig, stack_layers
from tests.models.drawn import drawn

TINY = DecoderConfig(layers=3, width=8, heads=2, vocab=11, context=6)
TOKENS = jnp.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


def count(config):
    """Shapes of the decoder's parameters."""
    variables = jax.eval_shape(Decoder(config).init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))
    return sum(leaf.size for leaf in jax.tree.leaves(variables["params"]))


@pytest.fixture(scope="module")
def params():
    """Parameters of the unrolled tiny decoder, all random, including norms and biases."""
    return drawn(Decoder(TINY).init, TOKENS)["params"]


@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scanned"])
def test_parameter_count_of_gpt2(scan):
    """GPT-2 small has the published 124M."""
    assert count(DecoderConfig(layers=12, width=768, heads=12, vocab=50257, scan=scan)) == 124_439_808


def test_untied_embedding_adds_a_projection():
    assert count(replace(TINY, tied=False)) - count(TINY) == TINY.width * TINY.vocab


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scanned"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_logits_and_parameters_are_float32(scan, tied, dtype):
    model = Decoder(replace(TINY, scan=scan, tied=tied, dtype=dtype))
    logits, variables = jax.eval_shape(lambda: model.init_with_output(jax.random.key(0), TOKENS))
    assert (logits.shape, logits.dtype) == ((2, 5, 11), jnp.float32)
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {jnp.dtype(jnp.float32)}


@pytest.mark.slow
def test_scanned_decoder_equals_the_unrolled_one(params, quick_jit):
    def loss(params, scan):
        logits = Decoder(replace(TINY, scan=scan)).apply({"params": params}, TOKENS)
        return jnp.square(logits).mean(), logits

    gradients = quick_jit(jax.grad(loss, has_aux=True), static_argnums=1)
    unrolled, logits = gradients(params, False)
    scanned, scanned_logits = gradients(stack_layers(params), True)
    np.testing.assert_allclose(scanned_logits, logits, rtol=1e-4, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), scanned, stack_layers(unrolled))


def test_no_token_sees_a_later_one(params, quick_jit):
    apply = quick_jit(Decoder(TINY).apply)
    changed = TOKENS.at[:, 3].set(0)
    before, after = (apply({"params": params}, tokens) for tokens in (TOKENS, changed))
    np.testing.assert_allclose(before[:, :3], after[:, :3], rtol=1e-4, atol=1e-5)
    assert (abs(before - after)[:, 3:].max(-1) > 1e-3).all()


def test_more_tokens_than_context_are_refused():
    with pytest.raises(ValueError, match="exceed the context of 6"):
        jax.eval_shape(Decoder(TINY).init, jax.random.key(0), jnp.zeros((1, 7), jnp.int32))


def test_width_must_split_among_heads():
    with pytest.raises(ValueError, match="divisor"):
        DecoderConfig(width=10, heads=4)
