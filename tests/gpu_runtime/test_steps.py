"""Planned steps on XLA's GPU runtime are plain ones to the bit, in the memory that was said, whenever copies run."""

from __future__ import annotations

import pytest

from tests.gpu_runtime import programs

MIB = 1 << 20

# In one block of memory from the start: a growing pool counts whole chunks where less was asked for.
PREALLOCATED = {"device_mib": 2048, "env": {"XLA_PYTHON_CLIENT_PREALLOCATE": "true"}}

# Copies run as soon as they can, as late as they can, or in an order that is drawn as everything else's.
SCHEDULES = [("eager", 0), ("late", 0), ("random", 1)]


def check_planned(watched, toy, shares, steps, schedule, seed):
    ran = watched(programs.plain_and_planned, toy, shares, steps, schedule=schedule, seed=seed, **PREALLOCATED)
    found = ran.value
    assert found["finite"]
    assert found["equal"] == found["arrays"] > 0
    for row in found["rows"]:
        assert row["leaked"] <= 0, row  # what the first step still held may have gone since
        assert abs(row["observed"] - row["compiled"]) <= MIB, row
    planned = found["rows"][:-1]
    assert all(row["status"] == "fits" for row in planned)
    assert any(row["copies"] for row in planned)
    end = dict(word.split("=") for word in ran.lines()[-1][3:])
    # Beside what was predicted the pool has what XLA stages arrays in, on their way to and from jax.
    assert max(row["pinned"] for row in planned) <= int(end["host_peak"])


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES[1:])
def test_a_step_with_copies_is_the_plain_step(watched, schedule, seed):
    check_planned(watched, "mlp", [0.75], 3, schedule, seed)


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_a_unet_is_the_plain_one(watched, schedule, seed):
    check_planned(watched, "unet3d", [0.5, 0.7], 2, schedule, seed)


def test_what_else_a_user_may_ask_of_a_step(watched, tmp_path):
    found = watched(programs.requests, str(tmp_path), schedule="random", seed=4).value
    assert found["equal"] == found["arrays"], found
    assert found["donated arguments are gone"]
    assert found["wrong arguments"].startswith("TypeError"), found
    assert found["does not fit"].startswith("InfeasibleBudgetError"), found
    assert found["leaked"] == 0


def test_state_on_the_host_gives_the_same_numbers(watched):
    found = watched(programs.held, 0.92, schedule="late", **PREALLOCATED).value
    assert found["equal"] == found["arrays"], found
    assert found["kinds"] == ["device", "pinned_host"]
    assert found["compiled"] <= found["budget"]
    assert found["on host"] >= 8 * MIB  # eight parameters


@pytest.mark.slow  # XLA waits ten seconds for memory
def test_a_full_device_is_told_in_words(watched):
    found = watched(programs.too_little_memory, 0.75, **PREALLOCATED).value
    assert found["failure"].startswith("OutOfMemoryError"), found
    assert found["equal"] == found["arrays"], found


@pytest.mark.slow
def test_a_full_pinned_pool_is_told_in_words(watched):
    found = watched(programs.too_little_pinned_memory, 0.75, host_mib=4).value
    assert found["failure"].startswith("OutOfMemoryError"), found
    assert found["equal"] == found["arrays"], found
