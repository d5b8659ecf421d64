"""Compiling for a device: bytes by the compiler, its live set named, and clear words where there is no compiler."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies

import memplan
from memplan.api import Planned
from memplan.errors import UnknownDeviceError
from memplan.planning import devices
from memplan.planning.layout import cut
from memplan.planning.order import early_loose_ends
from memplan.planning.plan import Plan
from memplan.planning.unfold import Mode, keep_everything, unfold
from memplan.program import targets
from memplan.program.extract import extract
from memplan.xla.local import closest_name, local_device
from memplan.program.rewrite import rewrite
from memplan.xla.target import Target, described_mesh, xla_rematerialization
from memplan.program.trace import as_step, trace

LAYERS, WIDTH, BATCH = 12, 512, 8192
needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("jax_plugins.xla_cuda12") is None if importlib.util.find_spec("jax_plugins") else True,
    reason="needs the extra gpu-aot",
)


def loss(weights: list[Any], x: Any) -> Any:
    for weight in weights:
        x = jnp.sin(x @ weight)
    return (x * x).mean()


def train(weights: list[Any], x: Any) -> Any:
    value, gradients = jax.value_and_grad(loss)(weights, x)
    return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], value


SHAPES = (
    [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * LAYERS,
    jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32),
)


def offloading_plan() -> Plan:
    """Every sine but the last few waits on the host for the backward pass; nothing is computed again."""
    graph = extract(trace(train, SHAPES, {}, {"donate_argnums": 0}))
    layout = cut(graph, early_loose_ends(graph), fence_nbytes=2**20)
    sines = [op.outputs[0] for op in graph.ops if op.name == "sin"]
    reads = {sine: [number for number, read in enumerate(layout.reads) if sine in read] for sine in sines[:-3]}
    actions, _ = unfold(layout, {(sine, numbers[-1]): Mode.OFFLOAD for sine, numbers in reads.items()})
    return Plan(tuple(actions), graph.fingerprint, "by hand", "v100")


@pytest.fixture(scope="module")
def planned() -> Planned:
    return memplan.jit(train, plan=offloading_plan(), device="v100", donate_argnums=0).plan(*SHAPES)


@needs_compiler
@pytest.mark.gpu_aot
class TestDescribedGpu:
    def test_the_prediction_is_what_the_compiler_allocates(self, planned: Planned) -> None:
        report = planned.report
        assert report.compiled_peak_bytes is not None
        assert report.compiled_peak_bytes < report.baseline_peak_bytes
        assert report.predicted_peak_bytes == pytest.approx(report.compiled_peak_bytes, rel=0.1)

    def test_what_is_offloaded_is_on_the_host(self, planned: Planned) -> None:
        moved = [decision.nbytes for decision in planned.report.decisions if decision.decision == "offload"]
        assert moved == [4 * BATCH * WIDTH] * (LAYERS - 3)
        assert sum(moved) == planned.report.offloaded_bytes == planned.report.host_peak_bytes

    def test_the_live_set_names_values_and_lines(self, planned: Planned) -> None:
        live = [row for row in planned.report.live_at_peak if row.nbytes == 4 * BATCH * WIDTH]
        assert len(live) >= 4
        assert all(row.shape == f"float32[{BATCH},{WIDTH}]" for row in live)
        lines = {row.source for row in live if row.source != "argument"}
        assert lines
        assert all("test_targets.py:" in line for line in lines)

    def test_every_kind_of_leaf_is_placed(self) -> None:
        args = (jnp.ones((4, 4), jnp.bfloat16), jax.ShapeDtypeStruct((3,), jnp.int32), 2.0, True, jax.random.key(0))
        compiled = Target(devices.named("h200"), described=True).compile(
            lambda a, b, c, d, key: (a * c, b + 1, d, jax.random.bits(key, (4,))), args, {}, {}
        )
        assert compiled.memory.argument_bytes == 32 + 12 + 4 + 1 + 8
        assert compiled.compiled.out_info[0].dtype == jnp.bfloat16

    @pytest.mark.parametrize("with_schedule", [False, True])
    def test_products_whose_untimed_tile_xla_refuses_are_compiled(self, with_schedule: bool) -> None:
        def resized(image: jax.Array) -> jax.Array:
            return jax.image.resize(image, (2, 512, 512, 3), "bilinear")

        image = jax.ShapeDtypeStruct((2, 128, 128, 3), jnp.float32)
        h200 = Target(devices.named("h200"), described=True)
        compiled = h200.compile(resized, (image,), {}, {}, with_schedule=with_schedule)
        assert compiled.memory.output_bytes == 4 * 2 * 512 * 512 * 3
        assert (compiled.schedule is not None) == with_schedule
        assert "ENTRY" in compiled.text

    def test_donation_is_seen(self) -> None:
        shape = jax.ShapeDtypeStruct((1024,), jnp.float32)
        target = Target(devices.named("v100"), described=True)
        memory = target.compile(lambda x: x + 1, (shape,), {}, {"donate_argnums": 0}).memory
        assert memory.alias_bytes == 4096
        assert memory.device_bytes == memory.temp_bytes + 4096


def test_the_local_backend_accounts_for_what_it_allocates() -> None:
    memory = Target(local_device(), described=False).compile(lambda x: jnp.sin(x), (jnp.ones(1024),), {}, {}).memory
    assert (memory.argument_bytes, memory.output_bytes, memory.alias_bytes) == (4096, 4096, 0)
    assert memory.device_bytes == memory.temp_bytes + 8192


def test_an_unknown_device_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnknownDeviceError, match="v100"):
        memplan.jit(train, device="v1000")


def test_a_card_without_a_specification_is_refused_with_the_nearest() -> None:
    assert closest_name("NVIDIA H200") == "h200"
    assert closest_name("Tesla V100-SXM2-32GB").startswith("v100")
    with pytest.raises(UnknownDeviceError, match="Pass device="):
        closest_name("Voodoo 2")


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse(**_: Any) -> None:
        raise NotImplementedError("topology not implemented")

    monkeypatch.setattr(topologies, "get_topology_desc", refuse)
    described_mesh.cache_clear()
    yield
    described_mesh.cache_clear()


@pytest.mark.usefixtures("no_compiler")
def test_without_the_extra_the_error_says_what_to_install() -> None:
    step = memplan.jit(train, device="p100")
    with pytest.raises(UnknownDeviceError, match=r"pip install 'memplan\[gpu-aot\]'") as caught:
        step.plan(*SHAPES)
    assert isinstance(caught.value.__cause__, NotImplementedError)


def test_the_limit_of_xla_is_the_budget_on_a_described_device() -> None:
    target = Target(devices.named("v100"), described=True)
    limited, options = xla_rematerialization(target, 10**9, 10**8)
    assert int(0.8 * limited.device.memory_bytes) == pytest.approx(10**9, abs=2)
    assert options == {"xla_gpu_memory_limit_slop_factor": 100}


def test_the_limit_of_xla_on_a_real_device_is_in_percents() -> None:
    target = Target(devices.named("v100"), described=False)
    _, options = xla_rematerialization(target, target.device.memory_bytes // 2, 0)
    assert options == {"xla_gpu_memory_limit_slop_factor": 62}


def test_the_dump_of_the_program_is_the_largest(tmp_path: Any) -> None:
    (tmp_path / "a-live-range.txt").write_text("constants")
    (tmp_path / "b-live-range.txt").write_text("the program itself")
    assert targets._dumped(tmp_path, "-live-range.txt") == "the program itself"
    assert targets._dumped(tmp_path, "-buffer-assignment.txt") == ""


@needs_compiler
@pytest.mark.gpu_aot
def test_gradients_of_convolutions_are_still_known_as_such_between_fences() -> None:
    """XLA calls the library's own kernel only where the reversal of the filter stands beside the convolution."""

    def step(filters: list[Any], x: Any) -> Any:
        def loss(filters: list[Any]) -> Any:
            hidden = x
            for kernel in filters:
                dims = ("NHWC", "HWIO", "NHWC")
                hidden = jnp.sin(jax.lax.conv_general_dilated(hidden, kernel, (2, 2), "SAME", dimension_numbers=dims))
            return (hidden**2).mean()

        return jax.grad(loss)(filters)

    args = (
        [jax.ShapeDtypeStruct((3, 3, 32, 32), jnp.float32)] * 3,
        jax.ShapeDtypeStruct((8, 128, 128, 32), jnp.float32),
    )
    program = trace(step, args, {}, {})
    graph = extract(program)
    target = Target(devices.named("v100"), described=True)
    fenced = rewrite(program, graph, keep_everything(cut(graph, early_loose_ends(graph), 1), "v100"))
    texts = (target.compile(one, args, {}, {}).text for one in (step, as_step(program, fenced)))
    plain, planned = (text.count("$convBackwardInput") for text in texts)
    assert plain == planned == 2


@needs_compiler
@pytest.mark.gpu_aot
def test_statistics_of_rows_stay_inside_the_kernel_that_normalizes_them() -> None:
    """Where one of them goes through a fence, each of them costs another pass over the scores."""

    def step(weights: list[Any], x: Any) -> Any:
        def loss(weights: list[Any]) -> Any:
            hidden = x
            for weight in weights:
                scores = jnp.einsum("bqd,bkd->bqk", hidden, hidden @ weight)
                hidden = jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), hidden)
            return (hidden**2).mean()

        return jax.grad(loss)(weights)

    args = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 3, jax.ShapeDtypeStruct((8, 1024, 64), jnp.float32)
    program = trace(step, args, {}, {})
    graph = extract(program)
    target = Target(devices.named("a100"), described=True)
    whole = 4 * 8 * 1024**2  # bytes of the scores; whatever elementwise work makes in their size is dropped
    passes = []
    for fuses_rows in (False, True):
        layout = cut(graph, early_loose_ends(graph), 1, fuses_rows)
        made = [(v, graph.ops[graph.producer[v] or 0]) for v in layout.home if graph.nbytes(v) == whole]
        dropped = [v for v, op in made if op.fusion == "elementwise"]
        decisions = {(v, s): Mode.DROP for v in dropped for s in range(layout.home[v] + 1, len(layout.segments))}
        actions, _ = unfold(layout, decisions)
        planned = rewrite(program, graph, Plan(actions, graph.fingerprint, "by hand"))
        text = target.compile(as_step(program, planned), args, {}, {}).text
        passes.append(len(re.findall(r"kind=kInput.*op_name=\"[^\"]*/reduce_max\"", text)))
    assert passes[0] > 0 == passes[1]
