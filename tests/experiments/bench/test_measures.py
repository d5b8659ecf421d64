"""Measures of steps that the CPU compiles in seconds."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from experiments.bench.cases import CARDS, LARGE_IMAGES, SPEED, Case, Growth, growths
from experiments.bench.measures import growth, planned, releases
from experiments.bench.measures.bits import Training, compared, differing, effect_difference
from experiments.bench.questions import QUESTIONS
from experiments.bench.random_programs import Effect, drawn_program
from experiments.bench.random_steps import drawn_step
from experiments.bench.steps import least_halo_bytes, mlp_step
from memplan.report.difference import Difference
from memplan.report.model import LiveValue
from models.unet3d import UNet3DConfig
from tests import dense
from tests.cases.within_share import QUICK
from tests.cli.command import REPORT


@pytest.mark.gpu_aot
def test_a_step_is_planned_beside_what_it_is() -> None:
    case = Case("mlp", partial(mlp_step, 4, 256, 16384), "v100", 70)
    measurement = planned.measure(case)
    [row] = measurement.rows
    assert (
        measurement.status == "fits"
        and row["compiled_bytes"] <= row["budget_bytes"] == row["plain_bytes"] * 70 // 100
    )
    assert (
        row["step_s"] >= 0.9 * row["plain_step_s"] > 0
        and row["ready_s"] > 0 < row["plain_compile_s"]
    )
    assert planned.measure(replace(case, budget=None)).status == "untouched"


def test_a_release_is_what_the_older_jax_saved_and_this_one_checks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[tuple[str, ...]] = []
    live_value = LiveValue("net/layer_0", 7, "int8[7]", "net.py:3", "")
    old = replace(
        REPORT,
        live_at_peak=(live_value, replace(live_value, name="net/layer_1")),
        versions=(("jax", "1"),),
    )
    new = replace(
        REPORT,
        live_at_peak=(replace(live_value, nbytes=9, shape="int8[9]"),),
        versions=(("jax", "2"),),
    )

    def run(python: str, *words: str) -> int:
        ran.append((python, *words))
        if "--json" in words:
            Difference.of(old, new).save_json(words[-1])
        return 0

    monkeypatch.setattr(releases, "_run", run)
    monkeypatch.delenv(releases.VARIABLE, raising=False)
    with pytest.raises(SystemExit, match=releases.VARIABLE):
        releases.older_python()
    monkeypatch.setenv(releases.VARIABLE, "older")
    [row] = releases.measure(Case("net", int, "v100", facts={"call": "net:make"})).rows
    assert (row["old_jax"], row["jax"], row["exit_code"]) == ("1", "2", 0)
    assert (row["grown"], row["grown_bytes"], row["shrunk"], row["shrunk_bytes"]) == (1, 2, 1, 7)
    assert row["largest"] == {
        "kind": "larger",
        "new_shape": "int8[9]",
        "source": "net.py:3",
        "name": "net/layer_0",
    }
    check = "check", "net:make", "--against"
    assert [command[:4] for command in ran] == [("older", *check), (sys.executable, *check)]
    assert ran[0][5:] == ("--device", "v100", "--save") and ran[1][4:7] == (
        ran[0][4],
        "--device",
        "v100",
    )


def test_the_least_that_a_part_of_a_volume_sends() -> None:
    """Two convolutions, 1 -> 2 -> 2 channels: rims of the inputs (1, 2) and of one gradient (2)."""
    config = UNet3DConfig(levels=1, filters=2, in_channels=1)
    assert least_halo_bytes(8, (2, 1, 1), config) == 4 * 5 * (6 * 8 * 8 - 4 * 8 * 8)
    assert least_halo_bytes(8, (2, 4, 1), config) == 4 * 5 * (6 * 4 * 8 - 4 * 2 * 8)


def test_bits_that_were_compared_are_equal() -> None:
    for name in ("bits", "public_bits"):
        rows = QUESTIONS[name].rows()
        assert {row["case"] for row in rows} == set(QUESTIONS[name].cases)
        assert not [
            row for row in rows if (row["unequal"] and not row["gated"]) or not row["outputs"]
        ]


def test_all_that_were_drawn_were_equal() -> None:
    [row] = [row for row in QUESTIONS["drawn"].rows() if row["case"] == "500"]
    assert row["steps"] == 500 and row["plans"] == 600
    assert row["with_kernels_again"] > 400 and not row["unequal"]


@pytest.mark.slow
def test_a_step_drawn_at_random_keeps_every_bit() -> None:
    [plan] = compared(Training(*drawn_step(1), flags=QUICK), [70])
    assert plan.again and not (plan.unequal or plan.gated)


def test_a_program_drawn_at_random_keeps_every_bit_and_effect() -> None:
    [plan] = compared(Training(*drawn_program(22), steps=2, flags=QUICK), [65])
    assert plan.again and plan.effects
    assert not (plan.unequal or plan.gated or plan.other_effects)


def test_effects_that_are_lost_repeated_or_in_another_order_are_told() -> None:
    first, second, free = (
        Effect("ordered", 0, 1.0),
        Effect("ordered", 1, 2.0),
        Effect("unordered", 2, 3.0),
    )
    plain = [first, second, free]
    assert not effect_difference([free, first, second, Effect("pure", 3, 4.0)], plain, gated=False)
    assert "order" in effect_difference([second, first, free], plain, gated=False)
    assert "more {0: 1}" in effect_difference([first, *plain], plain, gated=False)
    assert "fewer {2: 1}" in effect_difference([first, second], plain, gated=False)
    near = [first, replace(second, value=2.01), free]
    assert "2.01" in effect_difference(near, plain, gated=False) and not effect_difference(
        near, plain, gated=True
    )


def test_steps_whose_state_is_donated_in_parts_are_compared() -> None:
    def step(weights: Any, count: Any, key: Any, x: Any) -> Any:
        noise = jax.random.normal(key, x.shape)
        return (
            weights - 0.1 * jnp.tanh(x + noise).T @ x @ weights,
            count + 1,
            {"key": key, "sum": weights.sum()},
        )

    args = jnp.eye(64), jnp.zeros((), jnp.int32), jax.random.key(0), jnp.ones((512, 64))
    training = Training(step, args, donated=(0, 1), flags=QUICK)
    first, second, third = training.run(training.plain())
    assert first["[1]"] != second["[1]"] != third["[1]"] and first["[0]"] != second["[0]"]
    assert first["[2]['key']"] == jax.random.key_data(args[2]).tobytes()
    assert list(differing([first, first], [first, {**first, "[1]": b""}])) == ["step 2: [1]"]
    for numbers in compared(training):
        assert not numbers.unequal and numbers.outputs == 4 and numbers.percent >= numbers.asked


def test_a_plan_follows_its_link() -> None:
    rows = {row["case"]: row for row in QUESTIONS["link_speed"].rows()}
    none, slow, fast = (rows[f"googlenet-{link}"] for link in ("none", "pcie3x16", "nvlink-c2c"))
    assert none["offloaded_bytes"] == 0 < slow["offloaded_bytes"] < fast["offloaded_bytes"]
    assert fast["again"] == 0 < none["again"] and fast["step_s"] < min(
        none["step_s"], slow["step_s"]
    )


def test_state_that_stays_on_the_host_is_there() -> None:
    rows = QUESTIONS["state"].rows()
    assert rows and all(row["host_bytes"] >= 0.99 * row["state_bytes"] for row in rows)


# The largest sizes.


@pytest.mark.parametrize(("fitting", "tried"), [(0, 1), (1, 2), (3, 4), (4, 8), (70, 100)])
def test_ever_larger_sizes_are_tried(fitting: int, tried: int) -> None:
    assert growth.count_to_try(100, lambda position: position < fitting) == tried


def growing(low: int, method: str) -> Case:
    """Four layers of equal width, with up to 2**20 rows."""

    def make(rows: int, remat: bool = False) -> Any:
        layers = [jax.ShapeDtypeStruct((2**13, 2**13), jnp.float32)] * 4
        return dense.step, (layers, jax.ShapeDtypeStruct((rows, 2**13), jnp.float32))

    grown = Growth("dense", make, range(low, 2**20 + 1, low), lambda rows: rows)
    return Case("dense", make, "v100", "15GiB", "256GiB", facts={"way": method, "growth": grown})


@pytest.mark.gpu_aot
@pytest.mark.slow
@pytest.mark.parametrize("method", ["plain", "memplan"])
def test_the_largest_of_each_way_fits_and_the_next_one_does_not(method: str) -> None:
    case = growing(2**15, method)
    [row] = growth.largest_by_method(case).rows
    assert row["compiled_bytes"] <= 15 * 2**30
    [refused] = growth.compiled(case, row["size"] + 2**15)
    assert refused.refused == row["limit"] != ""


def test_pixels_are_those_of_the_batch() -> None:
    for network in growths(CARDS["v100"][1]):
        if network.name in ("resnet50-batch", "unet3d-volume"):
            _, (_, batch) = network.make(network.sizes[0], True)
            assert network.pixels(network.sizes[0]) == math.prod(batch["image"].shape[:-1])


def test_every_network_grows_on_every_card() -> None:
    assert len(LARGE_IMAGES) == 7 * 4 * len(CARDS)
    doubled = [
        case.facts["pixels"]
        for case in SPEED.values()
        if case.name.startswith("resnet50-image-h200")
    ]
    assert all(later >= 2 * earlier for earlier, later in pairwise(doubled))
