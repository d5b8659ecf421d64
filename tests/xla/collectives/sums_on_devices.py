"""Steps with sums over eight CPU devices, as XLA compiles them and in phases; prints one JSON object.

Run in a process of its own, with the machines' sizes, such as 2x4.
"""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    " --xla_llvm_disable_expensive_passes=true"
)
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from memplan.hardware.machine import Machine
from tests.xla.collectives.links import steep
from tests.xla.collectives.shaped_on_devices import Step, mesh_of, off, run_shaped, spread


@dataclass(frozen=True)
class Case:
    """A step on a machine, and the type in which its sums travel between hosts."""

    machine: Machine
    step: Step
    args: tuple[Any, ...]
    wire: str | None = None
    unfused: bool = False

    def run(self) -> dict[str, Any]:
        """How far the results are off, how many collectives were written, and how many all-reduces stay in loops."""
        shaped, module = run_shaped(
            self.step, self.args, self.machine, wire=self.wire, unfused=self.unfused
        )
        kinds = [op.opcode for body in module.values() for op in body.ops.values()]
        counts = {kind: kinds.count(kind) for kind in ("all-reduce", "all-to-all", "all-gather")}
        loops = [body for body in module.values() if body is not module.entry]
        in_loops = sum(op.opcode == "all-reduce" for body in loops for op in body.ops.values())
        return {
            "off": off(jax.jit(self.step)(*self.args), shaped),
            "counts": counts,
            "in loops": in_loops,
        }


def summed(mesh: Mesh, axes: tuple[str, ...], scale: float = 1.0) -> Step:
    """Arrays of several shapes, summed over these axes in one psum; every device's copy is a result."""
    whole = PartitionSpec(mesh.axis_names)

    def local(x: jax.Array, n: jax.Array) -> Any:
        several = jax.lax.psum((x * scale, jnp.abs(x[:, :1]).sum(0), x.T), axes)
        lone = jax.lax.psum(x @ x.T, axes)
        count = jax.lax.psum(n, axes)
        again = jax.lax.psum(lone[:1] + 1, axes)
        maximum = jax.lax.pmax(x, axes)
        return jax.tree.map(lambda leaf: leaf[None], (several, lone, count, again, maximum))

    return jax.shard_map(local, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)


def train(ws: Any, x: jax.Array) -> Any:
    """A step of three layers with batch statistics."""

    def loss(ws: Any) -> jax.Array:
        h = x
        for w in ws:
            h = h @ w
            h = jnp.sin((h - h.mean(0)) * jax.lax.rsqrt(h.var(0) + 1e-1))
        return (h**2).mean()

    value, gradient = jax.value_and_grad(loss)(ws)
    return [w - 0.1 * d for w, d in zip(ws, gradient, strict=True)], value


def accumulate(ws: Any, x: jax.Array) -> Any:
    """Gradients of four microbatches, and within each of two parts, added up in nested loops."""

    def loss(ws: Any, part: jax.Array) -> jax.Array:
        h = part
        for w in ws:
            h = jnp.sin(h @ w)
        return (h**2).sum()

    def outer(total: Any, parts: jax.Array) -> Any:
        inner = jax.lax.scan(
            lambda so_far, part: (added(so_far, jax.grad(loss)(ws, part)), None), zeros, parts
        )[0]
        return added(total, inner), None

    added, zeros = lambda a, b: jax.tree.map(jnp.add, a, b), jax.tree.map(jnp.zeros_like, ws)
    parts = x.reshape(x.shape[0] // 8, 4, 2, -1).transpose(1, 2, 0, 3)
    return jax.lax.scan(outer, zeros, parts)[0]


def integers(*shape: int) -> jax.Array:
    """Whole numbers whose sums and products float32 holds."""
    return jnp.asarray(np.random.default_rng(0).integers(-9, 10, shape), jnp.float32)


def cases(shapes: Sequence[str]) -> Iterator[tuple[str, Case]]:
    for shape in shapes:
        sizes = tuple(map(int, shape.split("x")))
        mesh, machine = mesh_of(*sizes), steep(*sizes)
        x, n = spread(mesh, integers(8 * 3, 5)), spread(mesh, jnp.arange(8))
        names = mesh.axis_names
        for axes in (
            names,
            names[:1],
            names[1:],
            names[::-1],
            *((names[::2],) if len(names) > 2 else ()),
        ):
            yield f"{shape} over {' '.join(axes)}", Case(machine, summed(mesh, axes), (x, n))
        whole = NamedSharding(mesh, PartitionSpec())
        ws = jax.device_put(
            [jax.random.normal(jax.random.key(at), (24, 24)) / 5 for at in range(3)], whole
        )
        batch = spread(mesh, jax.random.normal(jax.random.key(9), (64, 24)))
        yield f"{shape} train", Case(machine, train, (ws, batch))
        yield f"{shape} accumulate", Case(machine, accumulate, (ws, batch), unfused=True)
        wide = spread(mesh, jax.random.normal(jax.random.key(1), (8 * 300, 150)))
        for wire in ("bfloat16", "float16"):
            yield f"{shape} {wire}", Case(machine, summed(mesh, names, 0.3), (wide, n), wire)


if __name__ == "__main__":
    print(json.dumps({name: case.run() for name, case in cases(sys.argv[1:])}))
