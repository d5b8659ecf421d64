"""Training steps whose residuals cross boundaries: branches, shard_maps, calls with shardings, loops in each other."""

import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.program.scans import Step

Net = Callable[[Any, Any], Any]
"""(weights of all layers, rows) -> rows."""
LAYERS, ROWS, WIDTH = 4, 6, 3


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:1]), ("d",))


def layer(x: Any, w: Any) -> Any:
    y = jnp.tanh(x @ w)
    return x + y * jax.nn.sigmoid(y)


def in_a_row(ws: Any, x: Any) -> Any:
    for w in ws:
        x = layer(x, w)
    return x


def scanned(ws: Any, x: Any) -> Any:
    return jax.lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0]


def in_branch(net: Net) -> Net:
    return lambda ws, x: jax.lax.cond(x[0, 0] > -9, net, lambda ws, x: 2 * x, ws, x)


def in_switch(net: Net) -> Net:
    """Three branches, of which two have residuals of one type."""

    def run(ws: Any, x: Any) -> Any:
        index = jnp.int32(1 + (x[0, 0] > -9))
        return jax.lax.switch(index, [lambda _, x: jnp.sin(x), net, net], ws, x)

    return run


def in_shard_map(net: Net, check_vma: bool = True) -> Net:
    rows = PartitionSpec("d")

    def run(ws: Any, x: Any) -> Any:
        specs = (PartitionSpec(), rows)
        mapped = jax.shard_map(
            net, mesh=mesh(), in_specs=specs, out_specs=rows, check_vma=check_vma
        )
        return mapped(ws, x)

    return run


def in_unchecked(net: Net) -> Net:
    return in_shard_map(net, check_vma=False)


def in_jit(net: Net) -> Net:
    def run(ws: Any, x: Any) -> Any:
        rows = NamedSharding(mesh(), PartitionSpec("d"))
        return jax.jit(net, in_shardings=(None, rows), out_shardings=rows)(ws, x)

    return run


def in_scan(net: Net, trips: int = 2) -> Net:
    """Over microbatches, one after the other."""

    def run(ws: Any, x: Any) -> Any:
        scales = jnp.arange(1.0, 1 + trips).astype(x.dtype)
        return jax.lax.scan(lambda x, scale: (jnp.sin(net(ws * scale, x)), None), x, scales)[0]

    return run


def in_vmap(net: Net) -> Net:
    return lambda ws, x: jax.vmap(lambda row: net(ws, row[None])[0])(x)


def in_checkpoint(net: Net) -> Net:
    return jax.checkpoint(net)


def with_own_gradient(net: Net) -> Net:
    """A `custom_vjp` that scales the gradient."""
    own = jax.custom_vjp(lambda ws, x: net(ws, x))

    def forward(ws: Any, x: Any) -> Any:
        return jax.vjp(net, ws, x)

    own.defvjp(forward, lambda pull, grad: pull(0.5 * grad))
    return own


def trained(net: Net, pullbacks: int = 1) -> Step:
    """The gradients of one or several losses of a network."""

    def step(ws: Any, x: Any) -> Any:
        y, pull = jax.vjp(net, ws, x)
        cotangents = (2 * y, jnp.sign(y), jnp.cos(y))[:pullbacks]
        return y, [pull(cotangent) for cotangent in cotangents]

    generator = np.random.default_rng(0)
    ws = generator.normal(size=(LAYERS, WIDTH, WIDTH)).astype(np.float32)
    return step, (ws, generator.normal(size=(ROWS, WIDTH)).astype(np.float32))


def whole_step_in_loop(net: Net) -> Step:
    """Trains until it has converged, at most three times."""
    step, (ws, x) = trained(net)

    def train(ws: Any, x: Any) -> Any:
        def trip(state: Any) -> Any:
            number, ws, _ = state
            y, ((grads, _),) = step(ws, x)
            return number + 1, ws - 0.1 * grads, jnp.square(y).mean()

        start = 0, ws, jnp.ones((), x.dtype)
        return jax.lax.while_loop(lambda state: (state[0] < 3) & (state[2] > 0), trip, start)

    return train, (ws, x)


def whole_step_in_branch(net: Net) -> Step:
    """Trains if the batch is finite."""
    step, args = trained(net)

    def train(ws: Any, x: Any) -> Any:
        def skip(ws: Any, x: Any) -> Any:
            return x, [(ws, x)]

        return jax.lax.cond(jnp.isfinite(x).all(), step, skip, ws, x)

    return train, args


def penalized(net: Net) -> Step:
    """The gradient of a gradient's norm."""

    def step(ws: Any, x: Any) -> Any:
        gradient = jax.grad(lambda x: net(ws, x).sum())
        return jax.grad(lambda ws: jnp.square(gradient(x) * ws.mean()).sum())(ws)

    return step, trained(net)[1]


STEPS: dict[str, Callable[[], Step]] = {
    "branch": lambda: trained(in_branch(in_a_row)),
    "switch": lambda: trained(in_switch(in_a_row)),
    "scan in a branch": lambda: trained(in_branch(scanned)),
    "scan in a switch": lambda: trained(in_switch(scanned)),
    "scan in a shard_map": lambda: trained(in_shard_map(scanned)),
    "unchecked shard_map": lambda: trained(in_unchecked(scanned)),
    "branch in a shard_map": lambda: trained(in_shard_map(in_branch(in_a_row))),
    "scan in a branch in a shard_map": lambda: trained(in_shard_map(in_branch(scanned))),
    "shard_map in a branch": lambda: trained(in_branch(in_shard_map(scanned))),
    "two shard_maps": lambda: trained(
        lambda ws, x: in_shard_map(scanned)(ws, in_shard_map(scanned)(ws, x))
    ),
    "scan in a jit": lambda: trained(in_jit(scanned)),
    "scan of scans in a branch": lambda: trained(in_branch(in_scan(scanned))),
    "branch in a scan": lambda: trained(in_scan(in_branch(in_a_row))),
    "branch in a branch": lambda: trained(in_branch(in_switch(scanned))),
    "three pullbacks": lambda: trained(scanned, pullbacks=3),
    "two pullbacks of a branch": lambda: trained(in_branch(scanned), pullbacks=2),
    "two pullbacks of a shard_map": lambda: trained(in_shard_map(scanned), pullbacks=2),
    "step in a while": lambda: whole_step_in_loop(scanned),
    "step in a branch": lambda: whole_step_in_branch(scanned),
    "gradient of a gradient": lambda: penalized(in_branch(scanned)),
    "gradient of a gradient of a scan": lambda: penalized(scanned),
    "gradient of a gradient of a shard_map": lambda: penalized(in_shard_map(scanned)),
    "gradient of a gradient in a scan": lambda: penalized(in_scan(in_a_row)),
}

_WRAPPERS: tuple[Callable[[Net], Net], ...] = (
    in_branch,
    in_switch,
    in_jit,
    in_scan,
    in_vmap,
    in_checkpoint,
    with_own_gradient,
)


def random_step(seed: int) -> Step:
    """Layers in up to three boundaries, of which one may be a `shard_map`; up to three pullbacks."""
    draw = random.Random(seed)
    net = draw.choice((in_a_row, scanned))
    wrappers = [draw.choice(_WRAPPERS) for _ in range(draw.randint(1, 3))]
    if draw.random() < 0.5:
        # inside of a shard_map, jax has no jit with shardings; and this one divides no single row
        wrappers = [wrap for wrap in wrappers if wrap not in (in_jit, in_vmap)]
        wrappers.insert(draw.randint(0, len(wrappers)), draw.choice((in_shard_map, in_unchecked)))
    for wrap in wrappers:
        net = wrap(net)
    kind = draw.choice((trained, trained, whole_step_in_loop, whole_step_in_branch, penalized))
    return kind(net, draw.randint(1, 3)) if kind is trained else kind(net)
