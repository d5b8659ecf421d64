"""Kernels of loops over slabs, as XLA compiles them for a GPU, against what the step needs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from memplan.hardware import catalog
from memplan.hardware.backend import GPU
from memplan.planning.slabs.slabs import Slabs
from memplan.program.lowerable import lowerable
from memplan.program.ops import flops_of_jaxpr
from memplan.program.slabs.write import axis_at, with_slabs
from memplan.program.trace import Program, trace
from memplan.xla.kernel_cost import matrix_flops
from memplan.xla.module import Computation
from memplan.xla.target import Target

SIDE, CHANNELS, TRIPS = 96, 16, 4


def gradient(numbers: Any, strides: Any, kernels: Any, x: jax.Array) -> Any:
    """Of two convolutions, of which the second has strides."""

    def loss(kernels: Any) -> jax.Array:
        ones = (1,) * len(strides)
        y = lax.conv_general_dilated(x, kernels[0], ones, "SAME", dimension_numbers=numbers)
        y = jnp.tanh(y)
        y = lax.conv_general_dilated(y, kernels[1], strides, "SAME", dimension_numbers=numbers)
        return jnp.sin(y).astype(jnp.float32).sum()

    return jax.grad(loss)(kernels)


def transposed(numbers: Any, strides: Any, kernels: Any, x: jax.Array) -> Any:
    """The result of a convolution and a transposed one."""
    ones = (1,) * len(strides)
    y = lax.conv_general_dilated(x, kernels[0], ones, "SAME", dimension_numbers=numbers)
    y = lax.conv_transpose(jnp.tanh(y), kernels[1], strides, "SAME", dimension_numbers=numbers)
    return jnp.sin(y).astype(jnp.float32).sum()


def traced(step: Any, rank: int, stride: int, dtype: str) -> Program:
    space = "DHW"[-rank:]
    numbers = (f"N{space}C", f"{space}IO", f"N{space}C")
    kernel = jax.ShapeDtypeStruct((*[3] * rank, CHANNELS, CHANNELS), dtype)
    x = jax.ShapeDtypeStruct((1, *[SIDE] * rank, CHANNELS), dtype)
    step = functools.partial(step, numbers, (stride,) * rank)
    return trace(step, ([kernel, kernel], x), {}, {})


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
@pytest.mark.parametrize("step", [gradient, transposed])
def test_no_zeros_between_rows_are_multiplied(
    step: Any, rank: int, stride: int, device: str, dtype: str
) -> None:
    """In one loop, which convolves a halo again."""
    pytest.importorskip("jax_cuda12_plugin")
    program = traced(step, rank, stride, dtype)
    first = program.flat.number_of[program.flat.eqns[0].outvars[0]]
    ops = frozenset(axis_at(program.flat, first, 1).graph.along)
    split = with_slabs(program, Slabs(first, 1, SIDE // TRIPS, ops, frozenset(), frozenset()))
    assert len(split.in_slabs[0].loops) == 1
    needed = flops_of_jaxpr(program.traced.jaxpr.jaxpr)
    assert flops(split, device) == pytest.approx(needed, rel=0.3)
