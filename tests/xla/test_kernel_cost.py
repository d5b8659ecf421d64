"""Bytes and FLOPs of kernels: by hand, then of what XLA compiles, against the same program's jaxpr."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from memplan.hardware import catalog
from memplan.hardware.efficiency import MatrixShape
from memplan.program.flat import Flat
from memplan.program.lowerable import Lowerable
from memplan.program.ops import flops_of_jaxpr
from memplan.xla.kernel_cost import KernelCost
from memplan.xla.target import Target
from tests.hlo import read_module
from tests.xla.costs import kernel_costs, moved_nbytes
from tests.xla.small_modules import ADD, BIG, MIB, UPDATED, module
from tests.xla.steps import array


def of(entry: str, bodies: str = "") -> KernelCost:
    """Of the last kernel."""
    return kernel_costs(read_module(module(entry, bodies)))[-1]


def test_a_kernel_reads_its_operands_once_and_writes_its_results() -> None:
    added = f"%sum = {BIG} fusion(%a, %b), kind=kLoop, calls=%fused_add"
    squared = (
        f"%pair = ({BIG}, {BIG}) tuple(%sum, %b)\n%first = {BIG} get-tuple-element(%pair), index=0"
    )
    kernels = kernel_costs(
        read_module(
            module(f"{added}\n{squared}\nROOT %square = {BIG} multiply(%first, %first)", ADD)
        )
    )
    assert [kernel.device_nbytes for kernel in kernels] == [6 * MIB, 4 * MIB]
    assert not any(kernel.flops or kernel.is_host_copy for kernel in kernels)


@pytest.mark.parametrize(
    ("shape", "nbytes"),
    [
        ("pred[3]", 3),
        ("bf16[3,5]{1,0}", 30),
        ("s4[3]{0:E(4)}", 2),
        ("c64[2]", 16),
        ("f8e4m3fn[7]", 7),
        ("u64[]", 8),
    ],
)
def test_bytes_of_shapes(shape: str, nbytes: int) -> None:
    assert of(f'ROOT %x = {shape} custom-call(), custom_call_target="draw"').device_nbytes == nbytes


def test_tuples_of_results_are_summed_across_comments() -> None:
    elements = ", ".join(["f32[8]{0}"] * 5 + ["/*index=5*/f32[8]{0}"])
    assert (
        of(f'ROOT %x = ({elements}) custom-call(), custom_call_target="draw"').device_nbytes
        == 6 * 32
    )


def test_a_library_call_does_not_move_its_workspace() -> None:
    config = 'custom_call_target="__cublas$lt$matmul", backend_config={"lhs_contracting_dimensions":["1"]}'
    cost = of(
        f"ROOT %product = (f32[512,512]{{1,0}}, s8[4194304]{{0}}) custom-call(%a, %b), {config}"
    )
    assert (cost.device_nbytes, cost.flops, cost.dtype) == (
        5 * MIB,
        2 * 512 * 512 * 1024,
        "float32",
    )


SLICED = """
%fused_slice (p0: f32[512,1024], p1: s32[]) -> f32[1,1024] {
  %p0 = f32[512,1024]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %seen = f32[512,1024]{1,0} bitcast(%p0)
  %row = f32[1,1024]{1,0} dynamic-slice(%seen, %p1, %zero), dynamic_slice_sizes={1,1024}
  ROOT %twice = f32[1,1024]{1,0} add(%row, %row)
}
"""


def test_only_the_slice_of_an_operand_is_read_and_only_the_update_of_a_buffer_written() -> None:
    index, row = 4, 4096
    sliced = "%row = f32[1,1024]{1,0} fusion(%a, %at), kind=kLoop, calls=%fused_slice"
    updated = f"ROOT %new = {BIG} fusion(%b, %row, %at), kind=kLoop, calls=%fused_update"
    both = module(f"%at = s32[] constant(3)\n{sliced}\n{updated}", SLICED + UPDATED)
    assert moved_nbytes(read_module(both)) == (row + index + row) + (row + index + row)


def test_an_update_that_is_read_again_in_its_fusion_touches_the_whole_buffer() -> None:
    bodies = UPDATED.replace("ROOT %new", "%new").replace(
        "%zero)\n}", "%zero)\n  ROOT %neg = BIG negate(%new)\n}"
    )
    entry = (
        f"%at = s32[] constant(3)\n%row = f32[1,1024]{{1,0}} constant({{...}})\nROOT %x = {BIG} fusion(%b, %row, %at), \
kind=kLoop, calls=%fused_update"
    )
    assert of(entry, bodies.replace("BIG", BIG)).device_nbytes == 4 * MIB + 4096 + 4


CONV = (
    'window={{size=3x3 pad=1_1x1_1}}, dim_labels={labels}, custom_call_target="__cudnn$conv{kind}"'
)


@pytest.mark.parametrize("labels", ["bf01_oi01->bf01", "b01f_o01i->b01f"])
@pytest.mark.parametrize("kind", ["Forward", "BackwardInput", "BackwardFilter"])
def test_the_three_convolutions_of_a_layer_cost_the_same(kind: str, labels: str) -> None:
    first = labels.startswith("bf")
    x, y = (
        ("f32[8,64,32,32]", "f32[8,128,16,16]")
        if first
        else ("f32[8,32,32,64]", "f32[8,16,16,128]")
    )
    w = "f32[128,64,3,3]" if first else "f32[128,3,3,64]"
    lhs, rhs, result = {
        "Forward": (x, w, y),
        "BackwardInput": (y, w, x),
        "BackwardFilter": (x, y, w),
    }[kind]
    cost = of(f"""
        %l = {lhs} constant({{...}})
        %r = {rhs} constant({{...}})
        ROOT %c = ({result}, u8[0]) custom-call(%l, %r), {CONV.format(kind=kind, labels=labels)}""")
    assert cost.flops == 2 * (8 * 128 * 16 * 16) * (64 * 3 * 3)
    is_filter_gradient = kind == "BackwardFilter"
    narrowest = 64 if kind == "BackwardInput" else 128
    name = "filter gradient" if is_filter_gradient else "convolution"
    assert cost.shape == MatrixShape(name, narrowest)


@pytest.mark.parametrize(("channels", "is_aligned"), [(3, False), (4, True)])
def test_pixels_of_three_channels_are_not_aligned(channels: int, is_aligned: bool) -> None:
    window = "window={size=3x3x3 pad=1_1x1_1x1_1}, dim_labels=b012f_o012i->b012f"
    cost = of(f"""
        %l = f32[2,16,16,16,{channels}] constant({{...}})
        %r = f32[32,3,3,3,{channels}] constant({{...}})
        ROOT %c = (f32[2,16,16,16,32], u8[0]) custom-call(%l, %r), {window}, \
custom_call_target="__cudnn$convForward\"""")
    assert cost.shape == MatrixShape("convolution", 32, is_aligned, volume=True)


def test_a_window_of_many_pixels_is_a_filter_gradient_s() -> None:
    window = "window={size=64x64 pad=1_1x1_1}, dim_labels=b01f_o01i->b01f"
    cost = of(f"""
        %l = f32[16,64,64,4] constant({{...}})
        %r = f32[32,64,64,4] constant({{...}})
        ROOT %c = (f32[16,3,3,32], u8[0]) custom-call(%l, %r), {window}, \
custom_call_target="__cudnn$convForward\"""")
    assert cost.shape == MatrixShape("filter gradient", 32)


@pytest.mark.gpu_aot
@pytest.mark.parametrize(("rank", "groups"), [(2, 1), (3, 1), (2, 4)])
def test_shapes_of_a_compiled_layer_are_those_of_its_equations(rank: int, groups: int) -> None:
    pytest.importorskip("jax_cuda12_plugin")
    args = array(2, *[16] * rank, 64), array(*[3] * rank, 64 // groups, 128)
    step = gradients_of_convolution(rank, 1, groups)
    module = Target(catalog.named("h200"), True).compile(Lowerable(step, args)).module
    shapes = [kernel.shape for kernel in kernel_costs(module) if kernel.flops]
    ops = Flat(jax.make_jaxpr(step)(*args)).graph.ops
    assert Counter(shapes) == Counter(op.shape for op in ops if op.flops_dtype)


def jaxpr_flops(step: Callable[..., Any], *args: Any) -> float:
    return flops_of_jaxpr(jax.make_jaxpr(step)(*args).jaxpr)


def compiled(step: Callable[..., Any], *args: Any, device: str = "v100") -> list[float]:
    """FLOPs of the kernels that have some."""
    pytest.importorskip("jax_cuda12_plugin")
    module = Target(catalog.named(device), True).compile(Lowerable(step, args)).module
    return [kernel.flops for kernel in kernel_costs(module) if kernel.flops]


def gradients_of_convolution(rank: int, stride: int, groups: int = 1) -> Callable[..., Any]:
    space = "DHW"[-rank:]
    numbers = (f"N{space}C", f"{space}IO", f"N{space}C")

    def loss(x: jax.Array, kernel: jax.Array) -> jax.Array:
        strides = (stride,) * rank
        y = jax.lax.conv_general_dilated(
            x, kernel, strides, "SAME", dimension_numbers=numbers, feature_group_count=groups
        )
        return jnp.sin(y).sum()

    return jax.grad(loss, (0, 1))


@pytest.mark.gpu_aot
@pytest.mark.parametrize(
    ("stride", "rank"),
    [(1, 3), (2, 2), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((1, 2), (2, 3)))],
)
@pytest.mark.parametrize(("device", "dtype"), [("v100", "float32"), ("h200", "bfloat16")])
def test_flops_of_compiled_convolutions(rank: int, stride: int, device: str, dtype: str) -> None:
    x, kernel = array(2, *[16] * rank, 64, dtype=dtype), array(*[3] * rank, 64, 128, dtype=dtype)
    step = gradients_of_convolution(rank, stride)
    flops = compiled(step, x, kernel, device=device)
    assert len(flops) == 3
    assert sum(flops) == pytest.approx(3 * 2 * 2 * (16 // stride) ** rank * 128 * 64 * 3**rank)
    assert sum(flops) == pytest.approx(jaxpr_flops(step, x, kernel), rel=0.02)


@pytest.mark.gpu_aot
@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("v100", "float32"),
        pytest.param("a100", "bfloat16", marks=pytest.mark.slow),
        ("h200", "bfloat16"),
    ],
)
@pytest.mark.parametrize("batch", [(), (6,)])
def test_flops_of_compiled_matrix_products(device: str, dtype: str, batch: tuple[int, ...]) -> None:
    def step(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.tanh(jnp.einsum("...ij,...kj->...ik", a, b))

    args = array(*batch, 512, 256, dtype=dtype), array(*batch, 128, 256, dtype=dtype)
    flops = compiled(step, *args, device=device)
    assert len(flops) == 1
    assert sum(flops) == pytest.approx(2 * 512 * 256 * 128 * (batch[0] if batch else 1))
