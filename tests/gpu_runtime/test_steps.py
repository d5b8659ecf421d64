"""Planned steps on XLA's GPU runtime are plain ones to the bit, in the memory that was said, whenever copies run."""

from __future__ import annotations

import re

import pytest

from tests.gpu_runtime import programs

MIB = 1 << 20

# In one block of memory from the start: a growing pool counts whole chunks where less was asked for.
PREALLOCATED = {"device_mib": 2048, "env": {"XLA_PYTHON_CLIENT_PREALLOCATE": "true"}}

# Copies run as soon as they can, as late as they can, or in an order that is drawn as everything else's.
RUNS = [("eager", 0, 2), ("late", 0, 2), ("random", 1, 2)]
LONG_RUNS = [*RUNS, ("random", 2, 6)]  # over which nothing may be left behind

# Shares of the plain step's bytes. Where no plan by whole kernels fits a half, or 70 %: the least that some plan fits.
# ResNet over 32 images fits half and runs there, in four times as long. Larger ones of AlexNet and GoogLeNet need about
# as much as these: over 256 images 73 %, twice as wide 71; with all stages 72.
MODELS = {
    "unet3d": [0.5, 0.7], "unet2d": [0.5, 0.7], "nnunet3d": [0.5, 0.7], "nnunet2d": [0.5, 0.7], "decoder": [0.5, 0.7],
    "resnet": [0.7], "alexnet": [0.7], "googlenet": [0.8], "deeplab": [0.78],
    "decoder-bfloat16": [0.5],
}  # fmt: skip


def check_row(row):
    assert max(row["leaks"]) <= 0, row  # what the first step still held may have gone since
    assert abs(row["observed"] - row["compiled"]) <= MIB, row


def check_planned(watched, toy, shares, runs, conditions=0, **options):
    """`conditions`: of loops and branches; the host reads each through a pinned page of the program's own."""
    facts = watched(programs.plain_and_planned, toy, shares, runs, **options, **PREALLOCATED).value
    assert facts["finite"]
    assert facts["equal"] == facts["arrays"] > 0
    *planned, plain = facts["rows"]
    for row in facts["rows"]:
        check_row(row)
    assert all(row["status"] == "fits" for row in planned)
    assert any(row["copies"] for row in planned)
    # The first takes the most on the host; the others find its regions of the pool.
    pages = 4096 * conditions
    assert planned[0]["newly pinned"] - pages == planned[0]["pinned"] > 0
    assert all(row["newly pinned"] == pages for row in [*planned[1:], plain])


def test_a_step_with_copies_is_the_plain_step(watched):
    check_planned(watched, "mlp", [0.9], RUNS)


@pytest.mark.parametrize(
    ("toy", "conditions"),
    [
        pytest.param("body", 1, marks=pytest.mark.slow),
        ("branch", 1),
        pytest.param("body, branch, body", 3, marks=pytest.mark.slow),
    ],
)
def test_a_step_with_copies_in_a_body_and_a_branch_is_the_plain_step(watched, toy, conditions):
    """Without CUDA graphs: the stand-in has no conditions in them."""
    check_planned(watched, toy, [0.85], RUNS, conditions, graphs=False)


@pytest.mark.slow
@pytest.mark.parametrize("toy", MODELS)
def test_every_model_is_the_plain_one(watched, toy):
    check_planned(watched, toy, MODELS[toy], LONG_RUNS if toy == "unet2d" else RUNS)


@pytest.mark.slow
# batch norms over few elements: much noise
@pytest.mark.parametrize("toy", ["googlenet", "deeplab", "resnet"])
def test_a_step_differs_from_a_cpu_s_as_noise_does(watched, toy):
    facts = watched(programs.beside_a_cpu, toy).value
    assert facts["passes"], facts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("toy", "card"),
    [("unet3d", "a100"), ("nnunet2d", "a100"), ("decoder-bfloat16", "a100"), ("unet2d", "h100")],
)
def test_models_are_the_plain_ones_on_other_cards(watched, toy, card):
    # an A100's products take other workspaces
    shares = [0.6] if toy == "decoder-bfloat16" else MODELS[toy]
    check_planned(watched, toy, shares, RUNS[1:], card=card)


SLABS, LOOPS = (
    ("normalized", 0.4, "auto", "slabs on the host"),
    ("decoder-scan", 0.5, False, "loops on the host"),
)
# on a Hopper XLA gives each cuBLAS call 32 MiB
AROUND_A_WORKSPACE = ("decoder-scan", 0.82, False, "loops on the host")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("card", "case"),
    [
        *((card, case) for card in ("v100", "a100") for case in (SLABS, LOOPS)),
        *(("h100", case) for case in (SLABS, AROUND_A_WORKSPACE)),
    ],
)
def test_slabs_and_loops_pass_the_gate(watched, card, case):
    toy, share, split, where = case
    facts = watched(
        programs.rewritten,
        toy,
        share,
        split,
        LONG_RUNS if card == "v100" else RUNS,
        card=card,
        **PREALLOCATED,
    ).value
    assert facts["passes"], facts["gate"]
    assert facts["equal"] == facts["arrays"], facts  # whatever the schedule
    assert facts[where] > 0 and facts["copies"] + facts["kernels"] > 0, facts
    check_row(facts["row"])
    # Beside the pool every loop has a page of its own, for the condition that the host reads (xla's WhileThunk).
    assert facts["row"]["newly pinned"] == facts["row"]["pinned"] + 4096 * facts["loops"], facts


WORKSPACE = 2 * MIB


@pytest.mark.slow
def test_less_workspace_is_asked_for_before_a_step_is_refused(watched):
    """XLA's own autotuner, which takes an algorithm with workspace because it is faster."""
    env = {"STAND_IN_WORKSPACE": str(WORKSPACE)}
    facts = watched(programs.with_workspace, 0.9, card="a100", env=env).value
    plain, planned, followed = facts["reports"]
    assert (plain["workspace_bytes"], plain["slower_algorithms"]) == (WORKSPACE, 0)
    assert re.search(
        r"conv-bw-input.* \(tests/gpu_runtime/toys.py:\d+\)$", plain["workspace_kernel"]
    )
    assert facts["transforms"] == ["less workspace"] and planned["status"] == "fits", planned
    assert planned["compiled_peak_bytes"] <= planned["budget_bytes"]
    assert (planned["workspace_bytes"], planned["baseline_workspace_bytes"]) == (0, WORKSPACE)
    assert (
        planned["slower_algorithms"] == 8
    )  # of three layers: two kinds of gradients, no first input's
    for name in ("compiled_peak_bytes", "slower_algorithms", "predicted_step_s"):
        assert followed[name] == planned[name]
    assert followed["baseline_peak_bytes"] is None  # nobody has compiled the unmodified step
    # 20 ms each, and as long as a busy machine lets it sleep
    assert planned["slower_algorithms_s"] > 8 * 0.015
    assert facts["equal"] == facts["arrays"] > 0  # the stand-in's algorithms round alike


@pytest.mark.slow
def test_what_else_a_user_may_ask_of_a_step(watched, tmp_path):
    facts = watched(programs.requests, str(tmp_path), schedule="random", seed=4).value
    assert facts["equal"] == facts["arrays"], facts
    assert facts["donated arguments are gone"]
    assert facts["wrong arguments"].startswith("TypeError"), facts
    assert facts["does not fit"].startswith("InfeasibleBudgetError"), facts
    assert facts["leaked"] == 0


@pytest.mark.slow  # test_memory.py has a smaller state go round by default
def test_state_on_the_host_gives_the_same_numbers(watched, tmp_path):
    facts = watched(programs.held, 0.92, str(tmp_path), schedule="late", **PREALLOCATED).value
    assert facts["equal"] == facts["arrays"], facts
    assert facts["kinds"] == ["device", "pinned_host"]
    assert facts["compiled"] <= facts["budget"]
    assert facts["on host"] >= 8 * MIB  # eight parameters
    assert facts["newly pinned"] == facts["pinned"]


@pytest.mark.slow  # XLA waits ten seconds for memory
def test_a_full_device_is_told_in_words(watched):
    facts = watched(programs.too_little_memory, 0.75, **PREALLOCATED).value
    assert facts["failure"].startswith("OutOfMemoryError"), facts
    assert facts["equal"] == facts["arrays"], facts


@pytest.mark.slow
def test_a_full_pinned_pool_is_told_in_words(watched):
    facts = watched(programs.too_little_pinned_memory, 0.75, host_mib=4).value
    assert facts["failure"].startswith("OutOfMemoryError"), facts
    assert facts["equal"] == facts["arrays"], facts
