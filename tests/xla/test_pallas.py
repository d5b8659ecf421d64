"""Steps with Pallas kernels, for GPUs that are not here."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

import memplan
from memplan import UnsupportedProgramError
from memplan.hardware.backend import GPU
from memplan.verify.dataflow import NotThePlainModuleError
from memplan.verify.same_module import judge
from memplan.xla.buffers import problem_of
from memplan.xla.module import Module
from tests.xla.steps import array

pytestmark = [
    pytest.mark.gpu_aot,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning"),
]
ROWS = 4096


@pytest.fixture(autouse=True)
def plugin() -> None:
    pytest.importorskip("jax_cuda12_plugin")


def activation(x: jax.Array, **options: Any) -> jax.Array:
    """tanh in blocks of 32 x 64."""

    def kernel(x_ref: Any, y_ref: Any) -> None:
        y_ref[...] = jnp.tanh(x_ref[...])

    block = pl.BlockSpec((32, 64), lambda row, column: (row, column))
    return pl.pallas_call(
        kernel,
        grid=(x.shape[0] // 32, x.shape[1] // 64),
        in_specs=[block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        compiler_params=triton.CompilerParams(num_warps=4),
        **options,
    )(x)


act = jax.custom_vjp(activation)
act.defvjp(lambda x: (lambda y: (y, y))(activation(x)), lambda y, g: (g * (1 - y * y),))


def train(weights: Any, x: jax.Array) -> Any:
    def loss(weights: Any) -> jax.Array:
        hidden = x
        for weight in weights:
            hidden = act(hidden @ weight)
        return (hidden**2).mean()

    gradient = jax.grad(loss)(weights)
    return jax.tree.map(lambda weight, part: weight - 0.1 * part, weights, gradient)


def compiled(step: Callable[..., Any], *args: Any, **options: Any) -> Module:
    return memplan.jit(step, **options).plan(*args)._outcome.executable.module


def kernels(module: Module, target: str = "triton") -> list[Any]:
    return [op for op in module.entry.ops.values() if target in op.target]


@pytest.mark.slow
def test_kernels_are_run_again_within_a_budget() -> None:
    args = [array(256, 256)] * 3, array(ROWS, 256)
    planned = memplan.jit(
        train, device="a100", donate_argnums=0, budget="19MiB", host_budget=0, split=False
    ).plan(*args)
    assert planned.report.baseline_peak_bytes > 19 << 20 >= planned.report.compiled_peak_bytes
    assert len(kernels(planned._outcome.executable.module)) > 3


@pytest.mark.parametrize(("device", "capability"), [("h100", 90), ("b200", 100), ("rtx4090", 89)])
def test_a_kernel_is_lowered_for_the_card(
    device: str, capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lowering = sys.modules["jax._src.pallas.triton.lowering"]
    lowered, seen = lowering.lower_jaxpr_to_triton_module, []

    def record(jaxpr: Any, grid: Any, platform: str, capability: int, **options: Any) -> Any:
        seen.append(capability)
        return lowered(jaxpr, grid, platform, capability, **options)

    monkeypatch.setattr(lowering, "lower_jaxpr_to_triton_module", record)
    asks = sys.modules["jax._src.pallas.triton.gpu_info"].get_gpu_info
    assert len(kernels(compiled(activation, array(64, 64), device=device))) == 1
    assert {*seen} == {capability}
    assert sys.modules["jax._src.pallas.triton.gpu_info"].get_gpu_info is asks


@pytest.mark.parametrize("is_abstract", [False, True])
def test_inside_a_shard_map_of_the_user_s_mesh(is_abstract: bool) -> None:
    cpus = jax.devices()[:1]
    mesh = AbstractMesh((8,), ("data",)) if is_abstract else Mesh(np.array(cpus), ("data",))
    rows = PartitionSpec("data")
    x = jax.ShapeDtypeStruct((512, 64), jnp.float32, sharding=NamedSharding(mesh, rows))

    def step(x: jax.Array) -> jax.Array:
        return jax.shard_map(activation, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)(
            2 * x
        )

    module = compiled(step, x, device="a100")
    [kernel] = kernels(module)
    assert kernel.result[0].dims == (512 // mesh.size, 64)


def test_a_card_before_ampere_is_refused() -> None:
    with pytest.raises(UnsupportedProgramError, match=r"Triton kernel .* not for v100"):
        memplan.jit(activation, device="v100").plan(array(64, 64))


def test_a_mosaic_kernel() -> None:
    mosaic = pytest.importorskip("jax.experimental.pallas.mosaic_gpu")

    def kernel(x_ref: Any, y_ref: Any) -> None:
        rows = pl.ds(128 * jax.lax.axis_index("block"), 128)
        y_ref[rows] = jnp.tanh(x_ref[rows])

    def step(x: jax.Array) -> jax.Array:
        struct = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return mosaic.kernel(kernel, out_type=struct, grid=(4,), grid_names=("block",))(2 * x)

    args = array(512, 256)
    assert len(kernels(compiled(step, args, device="h100"), "mosaic")) == 1
    with pytest.raises(UnsupportedProgramError, match="newest GPU first"):
        memplan.jit(step, device="b200").plan(args)


def in_place(x: jax.Array) -> Any:
    """A kernel that overwrites its operand, and another reader of the operand."""
    product = x @ x
    return activation(product, input_output_aliases={0: 0}), product @ x


def test_a_kernel_in_place_runs_once_and_behind_all_readers() -> None:
    module = compiled(in_place, array(256, 256), device="a100")
    [kernel] = kernels(module)
    assert kernel.aliased_outputs == (((), 0),)
    problem = problem_of(module, GPU)
    [planned] = [other for other in problem.kernels if other.name == kernel.name]
    assert not planned.recomputable
    readers = [op.name for op, _ in module.entry.uses[kernel.operands[0]]]
    order = [op.name for op in module.entry.ops.values() if op.name in readers]
    assert order[-1] == kernel.name and len(order) > 1
    late = _with_first_behind(module, order[0], kernel.name)
    judge(module, module)
    with pytest.raises(NotThePlainModuleError, match="overwritten before"):
        judge(module, late)


def _with_first_behind(module: Module, first: str, last: str) -> Module:
    """The module, with an instruction of the entry, and what reads it, behind another."""
    ops = module.entry.ops
    moved = [name for name in ops if name == first or first in ops[name].operands]
    order = [name for name in ops if name not in moved]
    at = order.index(last) + 1
    order[at:at] = moved
    entry = module.entry.with_ops([ops[name] for name in order])
    return module.with_computations({**module, module.entry_name: entry})
