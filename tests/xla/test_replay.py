"""Seconds and copies: small modules by hand, then what XLA compiles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from memplan.hardware import catalog
from memplan.hardware.efficiency import PEAK
from memplan.hardware.roofline import copy_seconds, kernel_seconds
from memplan.program import compat
from memplan.program.lowerable import Lowerable
from memplan.xla.buffers import problem_of
from memplan.xla.module import Module
from memplan.xla.replay import Replay, replay
from memplan.xla.target import Target
from tests.hlo import read_module
from tests.xla.costs import moved_nbytes
from tests.xla.small_modules import ADD, BIG, HOST, MIB, UPDATED, chain, module
from tests.xla.steps import STEPS, array

V100 = replace(catalog.named("v100"), efficiency=PEAK)
CPU = catalog.local_cpu(2, 2**33)


def of(entry: str, bodies: str = "") -> Replay:
    return replay(read_module(module(entry, bodies)), V100)


ADD_S = kernel_seconds(0, "", 6 * MIB, V100)
COPY_S = copy_seconds(2 * MIB, V100)


def test_a_kernel_reads_its_operands_once_and_writes_its_results() -> None:
    timeline = of(f"""
        %sum = {BIG} fusion(%a, %b), kind=kLoop, calls=%fused_add
        %pair = ({BIG}, {BIG}) tuple(%sum, %b)
        %first = {BIG} get-tuple-element(%pair), index=0
        ROOT %square = {BIG} multiply(%first, %first)""", ADD)  # fmt: skip
    assert set(timeline.seconds) == {"sum", "square"}
    assert timeline.step_s == timeline.compute_s == pytest.approx(10 * MIB / V100.memory_bandwidth)
    assert timeline.flops == timeline.copy_s == 0


def start(name: str, source: str, to_host: bool) -> str:
    to_shape, from_shape = (HOST, BIG) if to_host else (BIG, HOST)
    return f"%{name} = ({to_shape}, {from_shape}, u32[]) copy-start(%{source})"


def done(name: str, of_start: str, to_host: bool) -> str:
    return f"%{name} = {HOST if to_host else BIG} copy-done(%{of_start})"


def test_a_copy_hides_under_kernels_and_stalls_for_the_rest() -> None:
    timeline = of(
        "\n".join([start("s", "a", True), chain(3, "k"), done("d", "s", True), chain(2, "l")]), ADD
    )
    assert timeline.copied_out_nbytes == 2 * MIB
    assert timeline.compute_s == pytest.approx(5 * ADD_S)
    assert timeline.copy_s == pytest.approx(COPY_S) and timeline.hidden_copy_s == pytest.approx(
        3 * ADD_S
    )
    assert timeline.step_s == pytest.approx(COPY_S + 2 * ADD_S)


def test_a_copy_with_enough_kernels_costs_nothing() -> None:
    enough = int(COPY_S / ADD_S) + 1
    timeline = of("\n".join([start("s", "a", True), chain(enough, "k"), done("d", "s", True)]), ADD)
    assert timeline.hidden_copy_s == pytest.approx(
        timeline.copy_s
    ) and timeline.step_s == pytest.approx(timeline.compute_s)


def test_directions_overlap_each_other_but_a_stream_serves_one_copy_at_a_time() -> None:
    out = [start("s0", "a", True), done("d0", "s0", True)]
    both = [
        start("s1", "b", True),
        start("s2", "d0", False),
        done("d1", "s1", True),
        done("d2", "s2", False),
    ]
    timeline = of("\n".join(out + both))
    assert timeline.copied_out_nbytes == 4 * MIB and [
        transfer.stream for transfer in timeline.transfers
    ] == [
        "out",
        "out",
        "in",
    ]
    assert timeline.step_s == pytest.approx(2 * COPY_S) and timeline.copy_s == pytest.approx(
        2 * COPY_S
    )
    starts = [start("s0", "a", True), start("s1", "b", True)]
    queued = of(
        "\n".join([*starts, done("d0", "s0", True), chain(1, "k"), done("d1", "s1", True)]), ADD
    )
    assert queued.step_s == pytest.approx(2 * COPY_S) and queued.hidden_copy_s == pytest.approx(
        ADD_S
    )


def test_a_synchronous_copy_blocks_and_a_copy_on_the_device_is_a_kernel() -> None:
    timeline = of(f"%h = {HOST} copy(%a)\n%c = {BIG} copy(%h)\n%e = {BIG} copy(%c)")
    assert [(transfer.stream, transfer.nbytes) for transfer in timeline.transfers] == [
        ("out", 2 * MIB),
        ("in", 2 * MIB),
    ]
    assert set(timeline.seconds) == {"e"} and timeline.hidden_copy_s == 0
    assert timeline.step_s == pytest.approx(2 * COPY_S + 4 * MIB / V100.memory_bandwidth)
    asynchronous = of(f"%s = ({BIG}, {BIG}, u32[]) copy-start(%a)\n%d = {BIG} copy-done(%s)")
    assert set(asynchronous.seconds) == {"s"} and asynchronous.copy_s == 0
    assert asynchronous.step_s == pytest.approx(4 * MIB / V100.memory_bandwidth)


def test_a_wrapped_update_of_a_host_buffer_copies_the_update() -> None:
    bodies = UPDATED.replace("p0 = f32[512,1024]{1,0}", f"p0 = {HOST}").replace(
        "new = f32[512,1024]{1,0}", f"new = {HOST}"
    )
    shape = f"(({HOST}, f32[1,1024]{{1,0}}, s32[]), {HOST}, u32[])"
    start = f"%s = {shape} fusion-start(%buffer, %row, %at)"
    timeline = of(f"""
        %buffer = {HOST} custom-call(), custom_call_target="AllocateBuffer"
        %at = s32[] constant(3)
        %row = f32[1,1024]{{1,0}} constant({{...}})
        {start}, kind=kLoop, calls=%fused_update
        %d = {HOST} fusion-done(%s)""", bodies)  # fmt: skip
    assert [(transfer.stream, transfer.nbytes) for transfer in timeline.transfers] == [
        ("out", 4096)
    ] and not timeline.seconds


BODY = f"""
%body (t: (f32[512,1024])) -> (f32[512,1024]) {{
  %t = ({BIG}) parameter(0)
  %x = {BIG} get-tuple-element(%t), index=0
  %y = {BIG} fusion(%x, %x), kind=kLoop, calls=%fused_add
  ROOT %out = ({BIG}) tuple(%y)
}}

%cond (t: (f32[512,1024])) -> pred[] {{
  %t = ({BIG}) parameter(0)
  ROOT %again = pred[] constant(true)
}}
"""


@pytest.mark.parametrize(("config", "trips"), [('{"known_trip_count":{"n":"7"}}', 7), ("{}", 1)])
def test_loops_count_their_trips(config: str, trips: int) -> None:
    loop = f"ROOT %w = ({BIG}) while(%t), condition=%cond, body=%body, backend_config={config}"
    timeline = of(f"%t = ({BIG}) tuple(%a)\n{loop}", ADD + BODY)
    assert (
        timeline.step_s
        == timeline.compute_s
        == pytest.approx(trips * 4 * MIB / V100.memory_bandwidth)
    )
    assert timeline.blocks == {"w": timeline.step_s} and timeline.seconds["y"] == pytest.approx(
        timeline.step_s / trips
    )


@pytest.mark.parametrize(
    ("chosen", "value", "bodies"),
    [
        ("pred[]", "true", "true_computation=%idle, false_computation=%body"),
        ("s32[]", "0", "branch_computations={%body, %idle}"),
    ],
)
def test_the_most_expensive_branch_and_inlined_calls(chosen: str, value: str, bodies: str) -> None:
    idle = f"\n%idle (t: (f32[512,1024])) -> (f32[512,1024]) {{\n  ROOT %t = ({BIG}) parameter(0)\n}}\n"
    timeline = of(f"""
        %p = {chosen} constant({value})
        %t = ({BIG}) tuple(%a)
        %c = ({BIG}) conditional(%p, %t, %t), {bodies}
        ROOT %call = ({BIG}) call(%c), to_apply=%body""", ADD + BODY + idle)  # fmt: skip
    assert timeline.step_s == pytest.approx(8 * MIB / V100.memory_bandwidth)
    assert timeline.blocks == {"c": timeline.step_s / 2, "call": timeline.step_s / 2}


def test_a_block_within_a_block_is_that_of_one_trip() -> None:
    trips = 'backend_config={"known_trip_count":{"n":"3"}}'
    around = f"""
%around (u: (f32[512,1024])) -> (f32[512,1024]) {{
  %u = ({BIG}) parameter(0)
  ROOT %v = ({BIG}) while(%u), condition=%cond, body=%body, {trips}
}}
"""
    timeline = of(f"""
        %t = ({BIG}) tuple(%a)
        ROOT %w = ({BIG}) while(%t), condition=%cond, body=%around, {trips}""", ADD + BODY + around)  # fmt: skip
    assert timeline.blocks == {"w": timeline.step_s, "v": pytest.approx(timeline.step_s / 3)}


PRODUCT_FLOPS = 2 * 1024 * 128 * 128  # of a layer of the steps below


@pytest.mark.parametrize(
    ("name", "products"), [("dense", 14), ("scanned", 15), ("branching", None)]
)
def test_a_step_of_a_cpu_is_the_sum_of_its_kernels_and_blocks(
    name: str, products: int | None
) -> None:
    step, args = STEPS[name](128, 5)
    module = Module.read(compat.module_of(jax.jit(step).lower(*args).compile()))
    timeline = replay(module, CPU)
    outer = [
        kernel.name
        for kernel in problem_of(module, backend=CPU.backend).kernels
        if kernel.block is None
    ]
    durations = {**timeline.seconds, **timeline.blocks}
    assert (
        timeline.step_s
        == timeline.compute_s
        == pytest.approx(sum(durations[name] for name in outer))
    )
    assert min(durations[name] for name in outer) > 0
    assert timeline.step_s >= timeline.flops / CPU.rate("float32")
    assert not timeline.transfers
    if products is not None:
        assert timeline.flops == products * PRODUCT_FLOPS


def compiled_module(
    step: Callable[..., Any], *args: Any, device: str = "v100", **flags: Any
) -> Module:
    pytest.importorskip("jax_cuda12_plugin")
    return Target(catalog.named(device), True).compile(Lowerable(step, args), flags).module


def compiled(step: Callable[..., Any], *args: Any, device: str = "v100", **flags: Any) -> Replay:
    return replay(compiled_module(step, *args, device=device, **flags), catalog.named(device))


@pytest.mark.gpu_aot
def test_a_compiled_scan_costs_the_same_product_each_trip() -> None:
    def step(x: jax.Array, weights: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda carry, w: (jnp.tanh(carry @ w), None), x, weights)[0]

    module = compiled_module(step, array(512, 512), array(7, 512, 512))
    assert replay(module, V100).flops == 7 * 2 * 512**3
    assert moved_nbytes(module) < 9 * MIB  # of a trip: the weights of one layer at a time


def there_and_back(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x waits on the host while y goes through three products."""
    away = jax.device_put(jnp.sin(x), jax.memory.Space.Host)
    for _ in range(3):
        y = jnp.tanh(y @ y)
    away, y = jax.lax.optimization_barrier((away, y))
    return jax.device_put(away, jax.memory.Space.Device) * 2, jnp.tanh(y @ y)


@pytest.mark.gpu_aot
def test_compiled_host_copies_go_both_ways() -> None:
    timeline = compiled(there_and_back, array(1024, 1024), array(2048, 2048))
    assert timeline.copied_out_nbytes == 4 * MIB
    assert {(transfer.stream, transfer.nbytes) for transfer in timeline.transfers} == {
        ("out", 4 * MIB),
        ("in", 4 * MIB),
    }
    assert timeline.copy_s == pytest.approx(copy_seconds(4 * MIB, V100))
    assert timeline.compute_s + 2 * timeline.copy_s == pytest.approx(
        timeline.step_s + 2 * timeline.hidden_copy_s
    )


@pytest.mark.gpu_aot
def test_the_latency_hiding_scheduler_hides_copies() -> None:
    args = array(1024, 1024), array(2048, 2048)
    timeline = compiled(there_and_back, *args, xla_gpu_enable_latency_hiding_scheduler=True)
    assert timeline.hidden_copy_s > 0.9 * timeline.copy_s
    assert timeline.step_s < timeline.compute_s + 0.2 * timeline.copy_s


@pytest.mark.gpu_aot
def test_offload_inside_a_scan_copies_one_slice_each_trip() -> None:
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["h"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.sin(checkpoint_name(jnp.tanh(x @ w), "h")) @ w, None

    def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.scan(jax.checkpoint(layer, policy=policy), x, weights)[0].sum()

    timeline = compiled(jax.grad(loss), array(7, 512, 512), array(512, 512))
    assert timeline.copied_out_nbytes == 7 * MIB
