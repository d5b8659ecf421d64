"""A neural ODE in Equinox: a network is the right-hand side, and a scan of Runge-Kutta steps solves it."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import memplan

STEPS, TIME_STEP = 20, 0.05
optimizer = optax.adam(5e-3)


def start():
    weights, data = jax.random.split(jax.random.key(0))
    field = eqx.nn.MLP(in_size=2, out_size=2, width_size=32, depth=2, activation=jnp.tanh, key=weights)
    points = jax.random.normal(data, (512, 2))
    turned = points @ jnp.array([[0.0, 1.0], [-1.0, 0.0]])  # what the flow shall do in one unit of time
    return field, optimizer.init(eqx.filter(field, eqx.is_array)), (points, turned)


def solve(field, points):
    slope = jax.vmap(field)

    def runge_kutta(y, _):
        k1 = slope(y)
        k2 = slope(y + TIME_STEP / 2 * k1)
        k3 = slope(y + TIME_STEP / 2 * k2)
        k4 = slope(y + TIME_STEP * k3)
        return y + TIME_STEP / 6 * (k1 + 2 * k2 + 2 * k3 + k4), None

    return jax.lax.scan(runge_kutta, points, None, length=STEPS)[0]


def loss_of(field, batch):
    points, turned = batch
    return ((solve(field, points) - turned) ** 2).mean()


@memplan.equinox.filter_jit(budget="9MiB", donate="all-except-first")  # was: @eqx.filter_jit(donate="all-except-first")
def train_step(batch, field, opt_state):
    loss, gradients = eqx.filter_value_and_grad(loss_of)(field, batch)
    loss = eqx.error_if(loss, ~jnp.isfinite(loss), "the loss is not finite")
    updates, opt_state = optimizer.update(gradients, opt_state, eqx.filter(field, eqx.is_array))
    return eqx.apply_updates(field, updates), opt_state, loss


field, opt_state, batch = start()
losses = []
for _ in range(5):
    field, opt_state, loss = train_step(batch, field, opt_state)
    losses.append(float(loss))
