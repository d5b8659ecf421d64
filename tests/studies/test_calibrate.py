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
from memplan.hardware.measured import MeasuredDevice
from memplan.request import target_of
from memplan.studies import calibrate
from memplan.xla.local import local_device
from tests.arrays import assert_close
from tests.dense import step as train
from tests.xla.steps import array

MATRIX = calibrate.MATRIX.format("float32")


def saved(base: catalog.Device, platform: str, kind: str, folder: Path, **rates: float) -> str:
    """A file of a device with these rates: `matrix`, `elementwise`, `memory`."""
    names = {"matrix": MATRIX, "elementwise": calibrate.ELEMENTWISE, "memory": calibrate.MEMORY}
    device = calibrate.with_rates(
        base, {names[name]: rate for name, rate in rates.items()}, platform
    )
    path = folder / "device.json"
    MeasuredDevice(device, platform, kind).save(path)
    return str(path)


ARGS = [array(64, 64)] * 6, array(4096, 64)


def test_the_local_device_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    stages: list[Any] = []
    rates = calibrate.measure(lambda *stage: stages.append(stage), quick=True)
    assert list(rates) == list(calibrate.rates_of(local_device()))
    assert [name for name, _ in stages] == [f"measuring {name}" for name in rates]
    assert all(rate > 0 for rate in rates.values())
    monkeypatch.setattr(calibrate, "measure", lambda notify: rates)
    device = calibrate.calibrate()
    assert device.device.name == f"{local_device().name}-measured"
    assert (device.platform, device.device_kind) == ("cpu", jax.devices()[0].device_kind)
    link = {calibrate.TO_HOST, calibrate.TO_DEVICE}
    of_device = calibrate.rates_of(device.device)
    assert all(of_device[name] == rates[name] for name in rates.keys() - link)
    assert {of_device[name] for name in link} == {min(rates[name] for name in link)}


def test_rates_grow_until_a_run_takes_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best of seven runs, of sizes that took 2 ms or more, up to the first that took 60 ms."""
    ran = Counter[int]()

    def best_s(run: int, runs: int) -> float:
        ran[run] += runs
        return {1: 1e-3, 2: 3e-3, 3: 7e-2, 4: 1.0}[run]

    work = {1: 1e9, 2: 3.0, 3: 7.0, 4: 1e9}
    task = calibrate._Task("bytes", (1, 2, 3, 4), work.__getitem__, lambda size: size)
    monkeypatch.setattr(calibrate, "_tasks", lambda device: [task])
    monkeypatch.setattr(calibrate, "_best_s", best_s)
    assert calibrate.measure() == {"bytes": 3.0 / 3e-3}
    assert ran == {1: 7, 2: 7, 3: 7}


def test_only_the_first_size_may_exceed_the_share_of_memory(monkeypatch: Any) -> None:
    sizes = [local_device().memory_bytes // 16 + more for more in (1, 2)]
    task = calibrate._Task("bytes", sizes, float, lambda size: size)
    monkeypatch.setattr(calibrate, "_tasks", lambda device: [task])
    monkeypatch.setattr(calibrate, "_best_s", lambda run, runs: 1e-2)
    assert calibrate.measure() == {"bytes": sizes[0] / 1e-2}


def test_sizes_and_what_they_take_grow() -> None:
    for task in calibrate._tasks(jax.devices()[0]):
        works = list(map(task.work, task.sizes))
        assert list(task.sizes) == sorted(task.sizes) and works == sorted(works) and works[0] > 0


def test_memory_is_swept_again_and_again() -> None:
    run = calibrate._in_place(lambda x: x + 1, 4096)
    assert (float(run()[0]), float(run()[0])) == (2.0, 3.0)


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


def test_a_product_is_as_many_operations_as_it_says() -> None:
    tasks = {task.name: task for task in calibrate._tasks(jax.devices()[0])}
    assert tasks[MATRIX].work(4 * 64**2) == 2.0 * 64**3
    assert tasks[MATRIX].make(4 * 64**2)().shape == (64, 64)
    assert tasks[calibrate.MATRIX.format("bfloat16")].make(2 * 64**2)().shape == (64, 64)


def test_a_rate_that_is_not_measured_keeps_its_ratio_and_is_named() -> None:
    base = local_device()
    device = calibrate.with_rates(base, {MATRIX: 128e9}, "cpu")
    assert device.rate("float64") == base.rate("float64") * 128e9 / base.rate("float32")
    assert any("bfloat16, float16, float64, int8" in source for source in device.sources)
    assert (device.memory_bandwidth, device.link) == (base.memory_bandwidth, base.link)


def test_a_link_has_the_slower_direction() -> None:
    rates = {calibrate.TO_HOST: 11e9, calibrate.TO_DEVICE: 10e9, calibrate.LATENCY: 3e-6}
    link = calibrate.with_rates(catalog.named("h200"), rates, "gpu").link
    assert (link.bandwidth, link.latency_s) == (10e9, 3e-6)
    assert "the slower direction" in link.source


@pytest.mark.slow
def test_plans_use_the_rates(tmp_path: Path) -> None:
    seconds = []
    for slowness in (1, 10):
        rates = {"matrix": 1e9 / slowness, "elementwise": 1e9 / slowness, "memory": 1e9 / slowness}
        path = saved(local_device(), "cpu", "cpu", tmp_path, **rates)
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
    path = saved(local_device(), "cpu", "cpu", tmp_path, matrix=1e9)
    weights = [0.1 * jnp.ones((64, 64))] * 6
    x = jnp.ones((4096, 64))
    step = memplan.jit(train, device=path, budget=6 * 2**20)
    expected = jax.jit(train)(weights, x)
    assert_close(step(weights, x), expected, rtol=1e-4, atol=1e-8)
    assert step.plan(weights, x).report.runs_on == jax.devices()[0].device_kind


def test_a_measured_cpu_is_the_local_backend(tmp_path: Path) -> None:
    target = target_of(saved(local_device(), "cpu", "cpu", tmp_path, matrix=1e9))
    assert not target.described and target.backend is CPU
    assert target.device.rate("float32") == 1e9


def test_a_measured_gpu_that_is_not_here_is_described(tmp_path: Path) -> None:
    target = target_of(saved(catalog.named("h200"), "gpu", "NVIDIA H200", tmp_path, matrix=4e14))
    assert target.described and target.backend is GPU
    assert target.device.target == catalog.named("h200").target


@pytest.mark.parametrize("text", [None, "", "{", '{"format": 1}'])
def test_a_bad_file_is_refused_at_once(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "device.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UnknownDeviceError, match=r"device\.json"):
        memplan.jit(train, device=str(path))
    with pytest.raises(UnknownDeviceError, match=r"device\.json"):
        api.compare(train, ARGS, device=str(path))
