"""LoRA: low-rank matrices are trained beside those of a frozen decoder; gradients accumulate over two batches."""

import jax
import jax.numpy as jnp
import optax

import memplan

VOCABULARY, WIDTH, LAYERS, RANK, BATCH, LENGTH = 64, 64, 3, 4, 8, 64
SHAPES = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
optimizer = optax.MultiSteps(optax.adamw(2e-2), every_k_schedule=2)


def start():
    keys = iter(jax.random.split(jax.random.key(0), 64))

    def normal(rows, columns):
        return jax.random.normal(next(keys), (rows, columns)) / rows**0.5

    frozen = {
        "embed": normal(VOCABULARY, WIDTH),
        "layers": [{name: normal(*shape) for name, shape in SHAPES.items()} for _ in range(LAYERS)],
    }
    adapters = [
        {name: (normal(rows, RANK), jnp.zeros((RANK, columns))) for name, (rows, columns) in SHAPES.items()}
        for _ in range(LAYERS)
    ]
    tokens = jnp.cumsum(jax.random.randint(next(keys), (BATCH, LENGTH), 1, 4), axis=1) % VOCABULARY
    return frozen, adapters, optimizer.init(adapters), tokens


def normed(x):
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6)


def logits_of(frozen, adapters, tokens):
    x = frozen["embed"][tokens]
    for own, low_rank in zip(frozen["layers"], adapters, strict=True):

        def dense(name, x, own=own, low_rank=low_rank):
            a, b = low_rank[name]
            return x @ own[name] + x @ a @ b

        q, k, v = jnp.split(dense("qkv", normed(x)).reshape(*tokens.shape, 4, -1), 3, axis=-1)
        x = x + dense("out", jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape))
        x = x + dense("down", jax.nn.gelu(dense("up", normed(x))))
    return normed(x) @ frozen["embed"].T


def loss_of(adapters, frozen, tokens):
    logits = logits_of(frozen, adapters, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@memplan.jit(budget="9500KiB", donate_argnums=(0, 1))  # was: @jax.jit(donate_argnums=(0, 1))
def train_step(adapters, opt_state, frozen, tokens):
    loss, gradients = jax.value_and_grad(loss_of)(adapters, frozen, tokens)
    updates, opt_state = optimizer.update(gradients, opt_state, adapters)
    return optax.apply_updates(adapters, updates), opt_state, loss


frozen, adapters, opt_state, tokens = start()
losses = []
for _ in range(6):
    adapters, opt_state, loss = train_step(adapters, opt_state, frozen, tokens)
    losses.append(float(loss))
