"""From measurements to a device that plans use, by the command and by `device=`."""

from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import memplan
from memplan import api
from memplan.errors import UnknownDeviceError
from memplan.hardware import catalog
from memplan.hardware.backend import CPU, GPU
from memplan.hardware.efficiency import PRODUCT
from memplan.hardware.measured import MeasuredDevice
from memplan.program.lowerable import Lowerable
from memplan.request import target_of
from memplan.studies import calibrate
from memplan.studies.fit import Timing
from memplan.studies.operations import OPERATIONS, chain, in_a_row, kernels, nbytes, repeated
from memplan.xla.kernel_cost import KernelCost
from memplan.xla.local import local_device
from memplan.xla.target import Target
from tests.arrays import assert_close
from tests.dense import step as train
from tests.xla.steps import array


def of_products(rate: float) -> calibrate.Measurements:
    """As if float32 products achieved this rate, and memory that many bytes/s."""
    product = Timing("product", (KernelCost(0, 0, 0, rate, "float32", PRODUCT),), 1.0)
    return calibrate.Measurements({calibrate.MEMORY: rate, calibrate.KERNEL: 0.0}, (product,))


def saved(base: catalog.Device, platform: str, kind: str, folder: Path, rate: float) -> str:
    """A file of a device that was measured to achieve a rate."""
    device = calibrate.with_measurements(base, of_products(rate), platform)
    path = folder / "device.json"
    MeasuredDevice(device, platform, kind).save(path)
    return str(path)


ARGS = [array(64, 64)] * 6, array(4096, 64)


def unchanged(size: int) -> Any:
    """A run that is known by its size."""
    return size


def test_the_local_device_is_measured() -> None:
    stages: list[Any] = []
    measurements = calibrate.measure(lambda *stage: stages.append(stage), quick=True)
    assert set(measurements.rates) <= set(calibrate.rates_of(local_device()))
    assert all(rate >= 0 for rate in measurements.rates.values())
    names = [timing.name for timing in measurements.operations]
    assert [name for name, _ in stages][-len(names) :] == [f"measuring {name}" for name in names]
    shares = [share for _, share in stages]
    assert shares == sorted(shares) and shares[0] == 0 and shares[-1] < 1


def test_a_calibrated_device_is_the_local_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "measure", lambda notify, quick: of_products(5e9))
    device = calibrate.calibrate()
    assert device.device.name == f"{local_device().name}-measured"
    assert (device.platform, device.device_kind) == ("cpu", jax.devices()[0].device_kind)
    of_device = calibrate.rates_of(device.device)
    assert of_device["matrix product float32, FLOP/s"] == of_device[calibrate.MEMORY] == 5e9


def test_rates_grow_until_a_run_takes_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best of seven runs, of sizes that took 2 ms or more, up to the first that took 60 ms."""
    ran = Counter[Any]()

    def best_s(run: Any, runs: int) -> float:
        ran[run] += runs
        return {1: 1e-3, 9: 3e-3, 20: 7e-2, 40: 1.0}[run]

    monkeypatch.setattr(calibrate, "_best_s", best_s)
    task = calibrate._Task("bytes", (1, 9, 20, 40), unchanged)
    assert calibrate._rate(task, 100, quick=False) == 9 / 3e-3
    assert ran == {1: 7, 9: 7, 20: 7}


def test_only_the_first_size_may_exceed_the_share_of_memory(monkeypatch: Any) -> None:
    task = calibrate._Task("bytes", (11, 12), unchanged)
    monkeypatch.setattr(calibrate, "_best_s", lambda run, runs: 1e-2)
    assert calibrate._rate(task, 10, quick=False) == 11 / 1e-2


def test_the_shortest_kernel_and_the_bandwidth_are_a_line(monkeypatch: Any) -> None:
    """Seconds of a kernel that reads and writes its array, between the launches of a step."""

    def chain(nbytes: int, count: int) -> float:
        return count * (2e-6 + 2 * nbytes / 1e12)

    monkeypatch.setattr(calibrate, "chain", chain)
    monkeypatch.setattr(calibrate, "_best_s", lambda run, runs: run)
    rates = calibrate._memory_rates(2**40, quick=False)
    assert rates[calibrate.KERNEL] == pytest.approx(2e-6)
    assert rates[calibrate.MEMORY] == pytest.approx(1e12)


def test_operations_are_as_large_as_the_device_needs(monkeypatch: Any) -> None:
    """One of half a millisecond, often enough in a row for 4 ms, whatever the card."""
    asked: list[tuple[int, int]] = []

    def repeated(operation: Any, scale: int, count: int) -> Any:
        asked.append((scale, count))
        return None, ()

    monkeypatch.setattr(calibrate, "repeated", repeated)
    monkeypatch.setattr(calibrate, "_best_s", lambda run, runs: 1.0)
    for device in (local_device(), catalog.named("h200"), catalog.named("p100")):
        for operation in OPERATIONS:
            calibrate._timing(operation, device, quick=False)
            scale, count = asked[-1]
            operation_s = operation.flops(scale) / device.rate(operation.dtype)
            assert 1 <= count <= 64 and (count == 64 or count * operation_s >= 4e-3)
            assert nbytes(operation, scale) <= max(nbytes(operation, 1), device.memory_bytes / 16)
            assert scale == 1 or operation.flops(1) / device.rate(operation.dtype) < 5e-4


@pytest.mark.parametrize("operation", OPERATIONS[:5:4] + OPERATIONS[-6:-3], ids=str)
def test_an_operation_runs_as_often_as_it_says(operation: Any) -> None:
    run, costs = repeated(operation, 1, 3)
    flops = [cost.flops for cost in costs if cost.flops]
    assert flops == [operation.flops(1)] * 3
    assert run().shape == operation.operands(1)[0].shape


@pytest.mark.slow
@pytest.mark.gpu_aot
@pytest.mark.parametrize("operation", OPERATIONS[::4], ids=str)
def test_a_gpu_runs_an_operation_as_one_kernel_of_its_class(operation: Any) -> None:
    """By cuBLAS, cuDNN or Triton, with the type and the narrow side that it says."""
    step = Lowerable(in_a_row(operation, 3), operation.operands(4), {}, {"donate_argnums": 0})
    executable = Target(catalog.named("h200"), described=True).compile(step)
    matrix = [kernel for kernel in kernels(executable.module) if kernel.flops]
    assert [kernel.flops for kernel in matrix] == [operation.flops(4)] * 3
    assert {kernel.dtype for kernel in matrix} == {operation.dtype}
    direction = getattr(operation, "direction", "product")
    kinds = {"forward": "convolution", "input gradient": "convolution"}
    assert {kernel.shape.kind for kernel in matrix} == {kinds.get(direction, direction)}


def test_operations_are_of_every_class() -> None:
    assert len({str(operation) for operation in OPERATIONS}) == len(OPERATIONS)
    kinds = {getattr(operation, "direction", "product") for operation in OPERATIONS}
    assert kinds == {"product", "forward", "input gradient", "filter gradient"}
    assert {operation.dtype for operation in OPERATIONS} == {"float32", "bfloat16", "float16"}


def test_memory_is_swept_again_and_again() -> None:
    run = chain(4096, 3)
    assert (float(run()[0]), float(run()[0])) == (4.0, 7.0)


@pytest.mark.parametrize(("out", "kind"), [(True, "pinned_host"), (False, "device")])
def test_copies_between_two_kinds_of_memory(out: bool, kind: str) -> None:
    """As on a GPU: the CPU's backend knows pinned host memory too."""
    moved: Any = calibrate._link_copy(jax.devices()[0], out, 4096)()
    assert (moved.sharding.memory_kind, moved.nbytes) == (kind, 4096)


def test_a_memory_copy_moves_its_bytes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[int] = []
    monkeypatch.setattr(np, "copyto", lambda to, _: moved.append(to.nbytes))
    calibrate._memory_copy(4096)()
    assert moved == [4096]


def test_a_rate_that_is_not_measured_keeps_its_ratio_and_is_named() -> None:
    base = local_device()
    device = calibrate.with_measurements(base, of_products(128e9), "cpu")
    assert device.rate("float64") == base.rate("float64") * 128e9 / base.rate("float32")
    assert any("bfloat16, float16, float64, int8" in source for source in device.sources)
    assert device.link == base.link
    assert "1 products" in device.efficiency.source


def test_a_link_has_the_slower_direction_and_keeps_its_latency() -> None:
    """A copy that Python starts takes 122 us on an H100, the copies of a step 2."""
    rates = {calibrate.TO_HOST: 11e9, calibrate.TO_DEVICE: 10e9}
    measurements = calibrate.Measurements(rates, ())
    base = catalog.named("h200")
    link = calibrate.with_measurements(base, measurements, "gpu").link
    assert (link.bandwidth, link.latency_s) == (10e9, base.link.latency_s)
    assert "the slower direction" in link.source


@pytest.mark.slow
def test_plans_use_the_rates(tmp_path: Path) -> None:
    seconds = []
    for slowness in (1, 10):
        path = saved(local_device(), "cpu", "cpu", tmp_path, 1e9 / slowness)
        report = (
            memplan.jit(train, device=path, budget=6 * 2**20, donate_argnums=0).plan(*ARGS).report
        )
        assert (report.device, report.status) == ("cpu-measured", "fits")
        assert report.planner == "kernels"
        seconds.append((report.predicted_step_s, report.lower_bound_s))
    (fast, fast_bound), (slow, slow_bound) = seconds
    assert slow == pytest.approx(10 * fast) and slow_bound == pytest.approx(10 * fast_bound)


@pytest.mark.slow
def test_a_step_planned_with_measured_rates_runs_here(tmp_path: Path) -> None:
    path = saved(local_device(), "cpu", "cpu", tmp_path, 1e9)
    weights = [0.1 * jnp.ones((64, 64))] * 6
    x = jnp.ones((4096, 64))
    step = memplan.jit(train, device=path, budget=6 * 2**20)
    expected = jax.jit(train)(weights, x)
    assert_close(step(weights, x), expected, rtol=1e-4, atol=1e-8)
    assert step.plan(weights, x).report.runs_on == jax.devices()[0].device_kind


def test_a_measured_cpu_is_the_local_backend(tmp_path: Path) -> None:
    target = target_of(saved(local_device(), "cpu", "cpu", tmp_path, 1e9))
    assert not target.described and target.backend is CPU
    assert target.device.rate("float32") == 1e9


def test_a_measured_gpu_that_is_not_here_is_described(tmp_path: Path) -> None:
    target = target_of(saved(catalog.named("h200"), "gpu", "NVIDIA H200", tmp_path, 4e14))
    assert target.described and target.backend is GPU
    h200 = catalog.named("h200")
    assert (target.device.target, target.device.flops) == (h200.target, h200.flops)
    share = target.device.efficiency.matrix_units.products
    assert share == 4e14 / h200.rate("float32")


@pytest.mark.parametrize("text", [None, "", "{", '{"format": 1}'])
def test_a_bad_file_is_refused_at_once(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "device.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UnknownDeviceError, match=r"device\.json"):
        memplan.jit(train, device=str(path))
    with pytest.raises(UnknownDeviceError, match=r"device\.json"):
        api.compare(train, ARGS, device=str(path))
