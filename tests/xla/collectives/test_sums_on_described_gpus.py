"""What XLA:GPU makes of sums in phases, for two hosts with four A100 that are only described."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from memplan.compilation.shaping import Shaping, collective_flags
from memplan.hardware import catalog
from memplan.hardware.backend import GPU
from memplan.hardware.topology import topology_named
from memplan.program import compat
from memplan.xla.collectives.cost import collective, is_collective
from memplan.xla.gpu.platform import described_devices
from memplan.xla.hook import intercept
from memplan.xla.module import Module
from tests.hardware.machines import on

MACHINE = on(topology_named("today@2x4"), 8)
HOST, DEVICE = ("host",), ("device",)
LAYERS, WIDTH = 2, 1024
GRADIENTS_NBYTES = LAYERS * WIDTH * WIDTH * 4

pytestmark = pytest.mark.gpu_aot


def loss(ws: Any, x: jax.Array) -> jax.Array:
    for w in ws:
        x = jnp.tanh(x @ w)
    return (x**2).mean()


def step(ws: Any, x: jax.Array) -> Any:
    value, gradient = jax.value_and_grad(loss)(ws, x)
    return [w - 0.1 * d for w, d in zip(ws, gradient, strict=True)], value


def accumulating(ws: Any, x: jax.Array) -> Any:
    def add(total: Any, part: jax.Array) -> Any:
        return jax.tree.map(jnp.add, total, jax.grad(loss)(ws, part)), None

    parts = x.reshape(x.shape[0] // 4, 4, -1).swapaxes(0, 1)
    gradient, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, ws), parts)
    return [w - 0.1 * d for w, d in zip(ws, gradient, strict=True)]


def compiled(
    of: Callable[..., Any], wire: str | None = None, divided: Any = (("host", "device"),)
) -> Module:
    devices = described_devices(catalog.named("a100"), 2, 4)
    mesh = Mesh(np.array(devices).reshape(2, 4), ("host", "device"))
    whole, rows = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), divided))
    ws = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32, sharding=whole)] * LAYERS
    x = jax.ShapeDtypeStruct((2048, WIDTH), jnp.float32, sharding=rows)

    def shaped(ws: Any, x: jax.Array) -> Any:
        return of(ws, x)

    lowered = jax.jit(shaped, donate_argnums=0, out_shardings=whole).lower(ws, x)
    options = {"xla_gpu_autotune_level": 0, **collective_flags(MACHINE, backend=GPU)}
    shaping = intercept("jit_shaped", lambda module: None, "cuda", Shaping(MACHINE, GPU, wire))
    with shaping as interception, compat.without_compilation_cache():
        executable = lowered.compile(compiler_options=options)
    interception.check()
    return Module.read(compat.module_of(executable))


def facts(module: Module) -> tuple[dict[tuple[str, tuple[str, ...]], int], float]:
    """Collectives by kind and levels, and the bytes that a host sends."""
    counts, outside = Counter[tuple[str, tuple[str, ...]]](), 0.0
    for body in module.values():
        for op in body.ops.values():
            if is_collective(op.opcode):
                nbytes = sum(body.ops[name].nbytes for name in op.operands)
                cost = collective(MACHINE, op.changed(shape=op.result[-1]), nbytes)
                counts[cost.kind, cost.axes] += 1
                outside += cost.outside_nbytes
    return dict(counts), outside


def test_sums_stay_and_xla_puts_them_together() -> None:
    """With the loss."""
    counts, _ = facts(compiled(step))
    assert counts == {("all-reduce", HOST + DEVICE): 1}


def test_half_as_many_bytes_in_bfloat16() -> None:
    counts, nbytes = facts(compiled(step, "bfloat16"))
    assert counts == {
        ("reduce-scatter", DEVICE): 1,
        ("all-to-all", HOST): 1,
        ("all-gather", HOST): 1,
        ("all-gather", DEVICE): 1,
    }
    assert nbytes == GRADIENTS_NBYTES / 2 + 8 * 2


@pytest.mark.parametrize("wire", [None, "bfloat16"])
def test_a_loop_that_accumulates_has_no_sums(wire: str | None) -> None:
    module = compiled(accumulating, wire)
    counts, _ = facts(module)
    assert sum(counts.values()) == (1 if wire is None else 4)
    loops = [op for op in module.entry.ops.values() if op.opcode == "while"]
    bodies = [module[name] for loop in loops for name in loop.called]
    assert bodies
    assert not any(is_collective(op.opcode) for body in bodies for op in body.ops.values())
