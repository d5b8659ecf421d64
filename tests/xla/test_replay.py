"""Bytes, FLOPs and seconds: small modules by hand, then what XLA compiles, against the same program's jaxpr."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from memplan.hardware import catalog
from memplan.hardware.roofline import copy_seconds, kernel_seconds
from memplan.program.primitives import flops_of_jaxpr
from memplan.xla.buffers import problem_of
from memplan.xla.module import read_module
from memplan.xla.replay import Traffic, traffic
from memplan.xla.target import Target
from tests.xla.compiling import STEPS

V100 = catalog.named("v100")
CPU = catalog.local_cpu(2, 2**33)
MIB = 2**20
BIG = "f32[512,1024]{1,0}"  # 2 MiB
HOST = "f32[512,1024]{1,0:T(8,128)S(5)}"

ADD = f"""
%fused_add (p0: f32[512,1024], p1: f32[512,1024]) -> f32[512,1024] {{
  %p0 = {BIG} parameter(0)
  %p1 = {BIG} parameter(1)
  ROOT %sum = {BIG} add(%p0, %p1)
}}
"""


def module(entry: str, bodies: str = "", flags: str = "is_scheduled=true") -> str:
    """Lines of an entry computation, with `%a` and `%b` of 2 MiB as its parameters, as the text of a module."""
    lines = "\n".join(f"  {line.strip()}" for line in entry.strip().splitlines())
    return f"""HloModule jit_step, {flags}, entry_computation_layout={{(f32[512,1024]{{1,0}})->f32[512,1024]{{1,0}}}}

FileNames
1 "step.py"
{bodies}
ENTRY %main.1 (a: f32[512,1024], b: f32[512,1024]) -> f32[512,1024] {{
  %a = {BIG} parameter(0), metadata={{op_name="a"}}
  %b = {BIG} parameter(1), metadata={{op_name="b"}}
{lines}
}}
"""


def of(entry: str, bodies: str = "") -> Traffic:
    return traffic(module(entry, bodies), V100)


def kernels(count: int, prefix: str) -> str:
    """A chain of fusions that move 6 MiB each."""
    names = ["a", *(f"{prefix}{i}" for i in range(count))]
    return "\n".join(
        f"%{after} = {BIG} fusion(%{before}, %b), kind=kLoop, calls=%fused_add"
        for before, after in itertools.pairwise(names)
    )


ADD_S = kernel_seconds(0, "", 6 * MIB, V100)
COPY_S = copy_seconds(2 * MIB, V100)


def test_a_kernel_reads_its_operands_once_and_writes_its_results() -> None:
    found = of(f"""
        %sum = {BIG} fusion(%a, %b), kind=kLoop, calls=%fused_add
        %pair = ({BIG}, {BIG}) tuple(%sum, %b)
        %first = {BIG} get-tuple-element(%pair), index=0
        ROOT %square = {BIG} multiply(%first, %first)""", ADD)  # fmt: skip
    assert (found.kernel_nbytes, found.kernels, found.convolutions) == (10 * MIB, 2, 0)
    assert found.step_s == found.compute_s == pytest.approx(10 * MIB / V100.memory_bandwidth)
    assert found.flops == found.copy_s == 0


@pytest.mark.parametrize(
    ("shape", "nbytes"),
    [("pred[3]", 3), ("bf16[3,5]{1,0}", 30), ("s4[3]{0:E(4)}", 2), ("c64[2]", 16), ("f8e4m3fn[7]", 7), ("u64[]", 8)],
)
def test_bytes_of_shapes(shape: str, nbytes: int) -> None:
    assert of(f"ROOT %x = {shape} rng()").kernel_nbytes == nbytes


def test_tuples_of_results_are_summed_across_comments() -> None:
    elements = ", ".join(["f32[8]{0}"] * 5 + ["/*index=5*/f32[8]{0}"])
    assert of(f"ROOT %x = ({elements}) custom-call()").kernel_nbytes == 6 * 32


def test_a_library_call_does_not_move_its_workspace() -> None:
    config = 'custom_call_target="__cublas$lt$matmul", backend_config={"lhs_contracting_dimensions":["1"]}'
    found = of(f"ROOT %product = (f32[512,512]{{1,0}}, s8[4194304]{{0}}) custom-call(%a, %b), {config}")
    assert (found.kernel_nbytes, found.flops) == (5 * MIB, 2 * 512 * 512 * 1024)
    assert found.compute_s == pytest.approx(found.flops / V100.rate("float32"))


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

UPDATED = """
%fused_update (p0: f32[512,1024], p1: f32[1,1024], p2: s32[]) -> f32[512,1024] {
  %p0 = f32[512,1024]{1,0} parameter(0)
  %p1 = f32[1,1024]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %new = f32[512,1024]{1,0} dynamic-update-slice(%p0, %p1, %p2, %zero)
}
"""


def test_only_the_slice_of_an_operand_is_read_and_only_the_update_of_a_buffer_written() -> None:
    index, row = 4, 4096
    sliced = "%row = f32[1,1024]{1,0} fusion(%a, %at), kind=kLoop, calls=%fused_slice"
    updated = f"ROOT %new = {BIG} fusion(%b, %row, %at), kind=kLoop, calls=%fused_update"
    found = of(f"%at = s32[] constant(3)\n{sliced}\n{updated}", SLICED + UPDATED)
    assert found.kernel_nbytes == (row + index + row) + (row + index + row)


def test_an_update_that_is_read_again_in_its_fusion_touches_the_whole_buffer() -> None:
    bodies = UPDATED.replace("ROOT %new", "%new").replace("%zero)\n}", "%zero)\n  ROOT %neg = BIG negate(%new)\n}")
    entry = (
        f"%at = s32[] constant(3)\n%row = f32[1,1024]{{1,0}} constant({{...}})\nROOT %x = {BIG} fusion(%b, %row, %at), \
kind=kLoop, calls=%fused_update"
    )
    assert of(entry, bodies.replace("BIG", BIG)).kernel_nbytes == 4 * MIB + 4096 + 4


def start(name: str, source: str, to_host: bool) -> str:
    there, here = (HOST, BIG) if to_host else (BIG, HOST)
    return f"%{name} = ({there}, {here}, u32[]) copy-start(%{source})"


def done(name: str, of_start: str, to_host: bool) -> str:
    return f"%{name} = {HOST if to_host else BIG} copy-done(%{of_start})"


def test_a_copy_hides_under_kernels_and_stalls_for_the_rest() -> None:
    found = of("\n".join([start("s", "a", True), kernels(3, "k"), done("d", "s", True), kernels(2, "l")]), ADD)
    assert (found.copied_out_nbytes, found.copied_in_nbytes, found.kernel_nbytes) == (2 * MIB, 0, 30 * MIB)
    assert found.compute_s == pytest.approx(5 * ADD_S)
    assert found.copy_s == pytest.approx(COPY_S) and found.hidden_copy_s == pytest.approx(3 * ADD_S)
    assert found.step_s == pytest.approx(COPY_S + 2 * ADD_S)


def test_a_copy_with_enough_kernels_costs_nothing() -> None:
    enough = int(COPY_S / ADD_S) + 1
    found = of("\n".join([start("s", "a", True), kernels(enough, "k"), done("d", "s", True)]), ADD)
    assert found.hidden_copy_s == pytest.approx(found.copy_s) and found.step_s == pytest.approx(found.compute_s)


def test_directions_overlap_each_other_but_a_stream_serves_one_copy_at_a_time() -> None:
    out = [start("s0", "a", True), done("d0", "s0", True)]
    both = [start("s1", "b", True), start("s2", "d0", False), done("d1", "s1", True), done("d2", "s2", False)]
    found = of("\n".join(out + both))
    assert found.copied_out_nbytes == 4 * MIB and found.copied_in_nbytes == 2 * MIB
    assert found.step_s == pytest.approx(2 * COPY_S) and found.copy_s == pytest.approx(2 * COPY_S)
    starts = [start("s0", "a", True), start("s1", "b", True)]
    queued = of("\n".join([*starts, done("d0", "s0", True), kernels(1, "k"), done("d1", "s1", True)]), ADD)
    assert queued.step_s == pytest.approx(2 * COPY_S) and queued.hidden_copy_s == pytest.approx(ADD_S)


def test_a_synchronous_copy_blocks_and_a_copy_on_the_device_is_a_kernel() -> None:
    found = of(f"%h = {HOST} copy(%a)\n%c = {BIG} copy(%h)\n%e = {BIG} copy(%c)")
    assert (found.copied_out_nbytes, found.copied_in_nbytes, found.kernels) == (2 * MIB, 2 * MIB, 1)
    assert found.kernel_nbytes == 4 * MIB and found.hidden_copy_s == 0
    assert found.step_s == pytest.approx(2 * COPY_S + 4 * MIB / V100.memory_bandwidth)
    asynchronous = of(f"%s = ({BIG}, {BIG}, u32[]) copy-start(%a)\n%d = {BIG} copy-done(%s)")
    assert (asynchronous.kernels, asynchronous.kernel_nbytes, asynchronous.copy_s) == (1, 4 * MIB, 0)


def test_a_wrapped_update_of_a_host_buffer_copies_the_update() -> None:
    bodies = UPDATED.replace("p0 = f32[512,1024]{1,0}", f"p0 = {HOST}").replace(
        "new = f32[512,1024]{1,0}", f"new = {HOST}"
    )
    found = of(f"""
        %buffer = {HOST} custom-call(), custom_call_target="AllocateBuffer"
        %at = s32[] constant(3)
        %row = f32[1,1024]{{1,0}} constant({{...}})
        %s = (({HOST}, f32[1,1024]{{1,0}}, s32[]), {HOST}, u32[]) fusion-start(%buffer, %row, %at), calls=%fused_update
        %d = {HOST} fusion-done(%s)""", bodies)  # fmt: skip
    assert (found.copied_out_nbytes, found.copied_in_nbytes, found.kernels) == (4096, 0, 0)


BODY = f"""
%body (t: (f32[512,1024])) -> (f32[512,1024]) {{
  %t = ({BIG}) parameter(0)
  %x = {BIG} get-tuple-element(%t), index=0
  %y = {BIG} fusion(%x, %x), kind=kLoop, calls=%fused_add
  ROOT %out = ({BIG}) tuple(%y)
}}
"""


@pytest.mark.parametrize(("config", "trips"), [('{"known_trip_count":{"n":"7"}}', 7), ("{}", 1)])
def test_loops_count_their_trips(config: str, trips: int) -> None:
    loop = f"ROOT %w = ({BIG}) while(%t), condition=%cond, body=%body, backend_config={config}"
    found = of(f"%t = ({BIG}) tuple(%a)\n{loop}", ADD + BODY)
    assert (found.kernels, found.kernel_nbytes) == (trips, trips * 4 * MIB)
    assert found.step_s == found.compute_s == pytest.approx(trips * 4 * MIB / V100.memory_bandwidth)
    assert found.blocks == {"w": found.step_s} and found.seconds["y"] == pytest.approx(found.step_s / trips)


@pytest.mark.parametrize(
    "bodies", ["true_computation=%idle, false_computation=%body", "branch_computations={%body, %idle}"]
)
def test_the_most_expensive_branch_and_inlined_calls(bodies: str) -> None:
    idle = f"\n%idle (t: (f32[512,1024])) -> (f32[512,1024]) {{\n  ROOT %t = ({BIG}) parameter(0)\n}}\n"
    found = of(f"""
        %p = pred[] constant(true)
        %t = ({BIG}) tuple(%a)
        %c = ({BIG}) conditional(%p, %t, %t), {bodies}
        ROOT %call = ({BIG}) call(%c), to_apply=%body""", ADD + BODY + idle)  # fmt: skip
    assert (found.kernels, found.kernel_nbytes) == (2, 8 * MIB)
    assert found.blocks == {"c": found.step_s / 2, "call": found.step_s / 2}


def test_a_block_within_a_block_is_that_of_one_trip() -> None:
    trips = 'backend_config={"known_trip_count":{"n":"3"}}'
    around = f"""
%around (u: (f32[512,1024])) -> (f32[512,1024]) {{
  %u = ({BIG}) parameter(0)
  ROOT %v = ({BIG}) while(%u), condition=%cond, body=%body, {trips}
}}
"""
    found = of(f"""
        %t = ({BIG}) tuple(%a)
        ROOT %w = ({BIG}) while(%t), condition=%cond, body=%around, {trips}""", ADD + BODY + around)  # fmt: skip
    assert found.blocks == {"w": found.step_s, "v": pytest.approx(found.step_s / 3)}


CONV = 'window={{size=3x3 pad=1_1x1_1}}, dim_labels={labels}, custom_call_target="__cudnn$conv{kind}"'


@pytest.mark.parametrize("labels", ["bf01_oi01->bf01", "b01f_o01i->b01f"])
@pytest.mark.parametrize("kind", ["Forward", "BackwardInput", "BackwardFilter"])
def test_the_three_convolutions_of_a_layer_cost_the_same(kind: str, labels: str) -> None:
    first = labels.startswith("bf")
    x, y = ("f32[8,64,32,32]", "f32[8,128,16,16]") if first else ("f32[8,32,32,64]", "f32[8,16,16,128]")
    w = "f32[128,64,3,3]" if first else "f32[128,3,3,64]"
    left, right, result = {"Forward": (x, w, y), "BackwardInput": (y, w, x), "BackwardFilter": (x, y, w)}[kind]
    found = of(f"""
        %l = {left} constant({{...}})
        %r = {right} constant({{...}})
        ROOT %c = ({result}, u8[0]) custom-call(%l, %r), {CONV.format(kind=kind, labels=labels)}""")
    assert found.flops == 2 * (8 * 128 * 16 * 16) * (64 * 3 * 3) and found.convolutions == 1


@pytest.mark.parametrize("text", ["", "HloModule jit_step", module(f"ROOT %c = {BIG} copy(%a)", flags="other=1")])
def test_what_is_not_scheduled_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="as_text"):
        traffic(text, V100)


def test_a_module_that_is_read_already_is_not_read_again() -> None:
    text = module(f"ROOT %c = {BIG} copy(%a)")
    read = read_module(text)
    assert traffic(read, V100) == traffic(read, V100) == traffic(text, V100)


PRODUCT_FLOPS = 2 * 1024 * 128 * 128  # of a layer of the steps below


@pytest.mark.parametrize(("name", "products"), [("dense", 14), ("scanned", 15), ("branching", None)])
def test_a_step_of_a_cpu_is_the_sum_of_its_kernels_and_blocks(name: str, products: int | None) -> None:
    step, args = STEPS[name](128, 5)
    text = jax.jit(step).lower(*args).compile().as_text()
    assert text is not None
    found = traffic(read_module(text), CPU)
    outer = [kernel.name for kernel in problem_of(read_module(text), on_gpu=False).kernels if kernel.within is None]
    told = {**found.seconds, **found.blocks}
    assert found.step_s == found.compute_s == pytest.approx(sum(told[name] for name in outer))
    assert min(told[name] for name in outer) > 0
    assert found.step_s >= max(found.flops / CPU.rate("float32"), found.kernel_nbytes / CPU.memory_bandwidth)
    assert found.copied_out_nbytes == found.copied_in_nbytes == 0
    if products is not None:
        assert (found.flops, found.convolutions) == (products * PRODUCT_FLOPS, products)


def compiled(step: Callable[..., Any], *args: Any, device: str = "v100", **flags: Any) -> Traffic:
    pytest.importorskip("jax_cuda12_plugin")
    target = catalog.named(device)
    return traffic(Target(target, True).compile(step, args, {}, {}, flags).text, target)


def jaxpr_flops(step: Callable[..., Any], *args: Any) -> float:
    return flops_of_jaxpr(jax.make_jaxpr(step)(*args).jaxpr)


def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


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
@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize(("device", "dtype"), [("v100", "float32"), ("h200", "bfloat16")])
def test_flops_of_compiled_convolutions(rank: int, stride: int, device: str, dtype: str) -> None:
    x, kernel = array(2, *[16] * rank, 64, dtype=dtype), array(*[3] * rank, 64, 128, dtype=dtype)
    step = gradients_of_convolution(rank, stride)
    found = compiled(step, x, kernel, device=device)
    assert found.convolutions == 3
    assert found.flops == pytest.approx(3 * 2 * 2 * (16 // stride) ** rank * 128 * 64 * 3**rank)
    assert found.flops == pytest.approx(jaxpr_flops(step, x, kernel), rel=0.02)


@pytest.mark.gpu_aot
@pytest.mark.parametrize(("device", "dtype"), [("v100", "float32"), ("a100", "bfloat16"), ("h200", "bfloat16")])
@pytest.mark.parametrize("batch", [(), (6,)])
def test_flops_of_compiled_matrix_products(device: str, dtype: str, batch: tuple[int, ...]) -> None:
    def step(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.tanh(jnp.einsum("...ij,...kj->...ik", a, b))

    args = array(*batch, 512, 256, dtype=dtype), array(*batch, 128, 256, dtype=dtype)
    found = compiled(step, *args, device=device)
    assert found.convolutions == 1
    assert found.flops == pytest.approx(2 * 512 * 256 * 128 * (batch[0] if batch else 1))


@pytest.mark.gpu_aot
def test_a_compiled_scan_costs_the_same_product_each_trip() -> None:
    def step(x: jax.Array, weights: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda carry, w: (jnp.tanh(carry @ w), None), x, weights)[0]

    found = compiled(step, array(512, 512), array(7, 512, 512))
    assert (found.convolutions, found.flops) == (7, 7 * 2 * 512**3)
    assert found.kernel_nbytes < 7 * 9 * MIB  # the weights of one layer at a time


def there_and_back(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x waits on the host while y goes through three products."""
    away = jax.device_put(jnp.sin(x), jax.memory.Space.Host)
    for _ in range(3):
        y = jnp.tanh(y @ y)
    away, y = jax.lax.optimization_barrier((away, y))
    return jax.device_put(away, jax.memory.Space.Device) * 2, jnp.tanh(y @ y)


@pytest.mark.gpu_aot
def test_compiled_host_copies_go_both_ways() -> None:
    found = compiled(there_and_back, array(1024, 1024), array(2048, 2048))
    assert found.copied_out_nbytes == found.copied_in_nbytes == 4 * MIB
    assert found.copy_s == pytest.approx(copy_seconds(4 * MIB, V100))
    assert found.compute_s + 2 * found.copy_s == pytest.approx(found.step_s + 2 * found.hidden_copy_s)


@pytest.mark.gpu_aot
def test_the_latency_hiding_scheduler_hides_copies() -> None:
    args = array(1024, 1024), array(2048, 2048)
    found = compiled(there_and_back, *args, xla_gpu_enable_latency_hiding_scheduler=True)
    assert found.hidden_copy_s > 0.9 * found.copy_s
    assert found.step_s < found.compute_s + 0.2 * found.copy_s


@pytest.mark.gpu_aot
def test_offload_inside_a_scan_copies_one_slice_each_trip() -> None:
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["h"], offload_src="device", offload_dst="pinned_host"
    )

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.sin(checkpoint_name(jnp.tanh(x @ w), "h")) @ w, None

    def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.scan(jax.checkpoint(layer, policy=policy), x, weights)[0].sum()

    found = compiled(jax.grad(loss), array(7, 512, 512), array(512, 512))
    assert found.copied_out_nbytes == found.copied_in_nbytes == 7 * MIB
