"""Kernels of loops over slabs, as XLA compiles them for a GPU, against those of the whole step."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from memplan.hardware import catalog
from memplan.hardware.backend import GPU
from memplan.planning.slabs.slabs import Slabs
from memplan.program.lowerable import lowerable
from memplan.program.slabs.write import axis_at, with_slabs
from memplan.program.trace import Program, trace
from memplan.xla.kernel_cost import matrix_flops
from memplan.xla.module import Computation
from memplan.xla.target import Target

SIDE, CHANNELS, TRIPS = 96, 16, 4


def strided(rank: int, stride: int, dtype: str) -> Program:
    """The gradient of two convolutions, of which the second has a stride."""
    space = "DHW"[-rank:]
    numbers = (f"N{space}C", f"{space}IO", f"N{space}C")

    def loss(kernels: Any, x: jax.Array) -> jax.Array:
        y = jnp.tanh(
            lax.conv_general_dilated(x, kernels[0], (1,) * rank, "SAME", dimension_numbers=numbers)
        )
        y = lax.conv_general_dilated(
            y, kernels[1], (stride,) * rank, "SAME", dimension_numbers=numbers
        )
        return jnp.sin(y).astype(jnp.float32).sum()

    kernel = jax.ShapeDtypeStruct((*[3] * rank, CHANNELS, CHANNELS), dtype)
    x = jax.ShapeDtypeStruct((1, *[SIDE] * rank, CHANNELS), dtype)
    return trace(jax.grad(loss), ([kernel, kernel], x), {}, {})


def flops(program: Program, device: str) -> float:
    """FLOPs of all matrix work that the compiled program runs."""
    module = Target(catalog.named(device), True).compile(lowerable(program, GPU)).module

    def of(body: Computation) -> float:
        return sum(
            op.trips * of(module[op.body])
            if op.opcode == "while"
            else matrix_flops(module, body, op)
            for op in body.ops.values()
        )

    return of(module.entry)


@pytest.mark.gpu_aot
@pytest.mark.parametrize(("device", "dtype"), [("v100", "float32"), ("h200", "bfloat16")])
@pytest.mark.parametrize(("rank", "stride"), [(2, 2), (2, 3), (3, 2)])
def test_gradients_of_strided_convolutions_multiply_no_zeros(
    rank: int, stride: int, device: str, dtype: str
) -> None:
    """In one loop, which convolves a halo again."""
    pytest.importorskip("jax_cuda12_plugin")
    program = strided(rank, stride, dtype)
    first = program.flat.number_of[program.flat.eqns[0].outvars[0]]
    ops = frozenset(axis_at(program.flat, first, 1).graph.along)
    slabs = Slabs(first, 1, SIDE // TRIPS, ops, frozenset(), frozenset())
    split = with_slabs(program, slabs)
    assert len(split.in_slabs[0].loops) == 1
    assert flops(split, device) == pytest.approx(flops(program, device), rel=0.3)
