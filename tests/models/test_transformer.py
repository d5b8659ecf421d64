from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.transformer import Decoder, DecoderConfig, stack_layers
from tests.models.drawn import count, drawn

TINY = DecoderConfig(layers=3, width=8, heads=2, vocab=11, context=6)
TOKENS = jnp.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


def parameters(config):
    tokens = jnp.zeros((1, 2), jnp.int32)
    return count(jax.eval_shape(Decoder(config).init, jax.random.key(0), tokens)["params"])


@pytest.fixture(scope="module")
def params():
    """Parameters of the unrolled tiny decoder, all random, including norms and biases."""
    return drawn(Decoder(TINY).init, TOKENS)["params"]


@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scanned"])
def test_parameter_count_of_gpt2(scan):
    """GPT-2 small has the published 124M."""
    config = DecoderConfig(layers=12, width=768, heads=12, vocab=50257, scan=scan)
    assert parameters(config) == 124_439_808


def test_untied_embedding_adds_a_projection():
    added = parameters(replace(TINY, tied=False)) - parameters(TINY)
    assert added == TINY.width * TINY.vocab


@pytest.mark.slow
def test_scanned_decoder_equals_the_unrolled_one(params, quick_jit):
    def loss(params, scan):
        logits = Decoder(replace(TINY, scan=scan)).apply({"params": params}, TOKENS)
        return jnp.square(logits).mean(), logits

    gradients = quick_jit(jax.grad(loss, has_aux=True), static_argnums=1)
    unrolled, logits = gradients(params, False)
    scanned, scanned_logits = gradients(stack_layers(params), True)
    np.testing.assert_allclose(scanned_logits, logits, rtol=1e-4, atol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        scanned,
        stack_layers(unrolled),
    )


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
