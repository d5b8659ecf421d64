"""The stand-in for CUDA's driver does what the tests rely on it for: arithmetic, limits, schedules, refusals."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from memplan.hardware import catalog
from memplan.xla import local
from tests.gpu_runtime import driver_programs, functions, jax_programs, stand_in

pytestmark = [
    pytest.mark.gpu_aot,
    pytest.mark.skipif(
        stand_in.missing() is not None, reason=f"no stand-in driver here: {stand_in.missing()}"
    ),
]
NAN_BITS = 0xFFFFFFFF


def numbers(ran: stand_in.Ran, word: str, *kinds: str) -> list[int]:
    """The operations in lines that begin with `word`, of some kinds only, in the log's order."""
    kind_of = {
        line[3]: line[2]
        for line in ran.lines()
        if line[3:] and line[2] in ("COPY", "SET", "KERNEL", "LIBCALL")
    }
    return [
        int(line[3][1:])
        for line in ran.lines()
        if line[2] == word and (not kinds or kind_of.get(line[3]) in kinds)
    ]


# ---- the driver itself


def test_device_and_pinned_memory_end_at_their_limits():
    ran = stand_in.run(driver_programs.limits, device_mib=800, host_mib=350)
    # 300 MiB of the device are the context's.
    assert ran.value == {
        "device": [0] * 5 + [driver_programs.OUT_OF_MEMORY],
        "pinned": [0] * 3 + [driver_programs.OUT_OF_MEMORY],
    }
    assert [line[3] for line in ran.lines() if line[2] == "OOM"] == ["device", "host"]


def test_fresh_memory_is_nan_and_what_is_not_freed_is_counted():
    ran = stand_in.run(driver_programs.fresh_and_leaked)
    assert ran.value == [NAN_BITS] * 4
    assert [line[3:] for line in ran.lines() if line[2] == "LEAK"] == [
        ["device", "4096", "bytes", "in", "1", "blocks"]
    ]


def test_touching_freed_memory_ends_the_process():
    with pytest.raises(stand_in.RunFailed, match="freed or was never allocated"):
        stand_in.run(driver_programs.touch_freed)


def test_schedules_run_copies_last_first_or_anywhere():
    def order(schedule: str, seed: int = 0) -> str:
        ran = stand_in.run(driver_programs.independent_work, 12, schedule=schedule, seed=seed)
        copies = set(numbers(ran, "BEGIN", "COPY"))
        return "".join(
            "c" if number in copies else "s" for number in numbers(ran, "BEGIN", "COPY", "SET")
        )

    assert order("eager") == "cs" * 12
    assert order("late") == "s" * 12 + "c" * 12
    assert order("early") == "c" * 12 + "s" * 12
    drawn = {seed: order("random", seed) for seed in (1, 2, 3)}
    assert len(set(drawn.values())) == 3 and all(
        sorted(text) == sorted("cs" * 12) for text in drawn.values()
    )


@pytest.mark.parametrize(
    ("schedule", "seed"), [("eager", 0), ("late", 0), ("early", 0), ("random", 1), ("random", 2)]
)
def test_events_order_streams_under_every_schedule(schedule, seed):
    assert stand_in.run(
        driver_programs.ordered_by_events, 20, schedule=schedule, seed=seed
    ).value == list(range(20))


def test_a_wait_that_is_forgotten_shows():
    ran = stand_in.run(
        driver_programs.ordered_by_events, 20, schedule="early", env={"STAND_IN_DROP_WAITS": "1"}
    )
    assert ran.value != list(range(20))
    assert sum(line[2] == "DROPPED" for line in ran.lines()) == 40


def test_an_unknown_instruction_is_refused_by_name():
    ran = stand_in.run(driver_programs.launch_unknown)
    assert ran.value == [driver_programs.NOT_SUPPORTED, NAN_BITS]
    assert (
        len(ran.refusals()) == 1
        and "kernel product: instruction is not known (in `mma.sync" in ran.refusals()[0]
    )


def test_lanes_diverge_and_meet_again():
    status, *words = stand_in.run(driver_programs.launch_diverging).value
    assert status == 0
    assert words == [(lane ^ 16) + 1 + (1000 if lane < 8 else 0) for lane in range(32)]


def test_matrices_of_shared_memory_are_spread_over_lanes():
    status, *words = stand_in.run(driver_programs.launch_matrices, card="h100").value
    matrix = np.arange(64, dtype=np.uint16).reshape(8, 8)
    pairs, turned = (
        list(map(int, np.ascontiguousarray(array).view(np.uint32).ravel()))
        for array in (matrix, matrix.T)
    )
    assert status == 0
    assert words == [word for three in zip(pairs, turned, pairs, strict=True) for word in three]


def test_functions_return_structs():
    assert stand_in.run(driver_programs.launch_returning).value == [
        0,
        *(40 * lane + 6 for lane in range(32)),
    ]


@pytest.mark.parametrize("seed", range(4))
def test_nodes_of_a_graph_wait_for_their_dependencies_alone(seed):
    ran = stand_in.run(driver_programs.launch_graph, schedule="random", seed=seed)
    assert ran.value == [12, 12]
    starts, nodes = numbers(ran, "BEGIN", "SET"), numbers(ran, "NODE")
    assert all(starts.index(last) > max(starts.index(first), starts.index(second))
               for first, second, last in (nodes[:3], nodes[3:]))  # fmt: skip


# ---- jax on it


@pytest.mark.parametrize(
    "card",
    [
        "v100",
        pytest.param("a100", marks=pytest.mark.slow),
        pytest.param("h100", marks=pytest.mark.slow),
    ],
)
def test_a_card_is_the_catalog_s_and_says_that_it_is_none(card):
    description = stand_in.run(jax_programs.describe, card=card).value
    assert description["platform"] == "gpu" and "Stand-in" in description["kind"]
    assert local.closest_name(description["kind"]) == card
    # XLA takes three quarters of what is free, of a card with as many bytes as the catalog says.
    assert description["limit"] == pytest.approx(0.75 * catalog.named(card).memory_bytes, rel=0.03)


def check_functions(card: str, group: str, **options) -> None:
    errors = stand_in.run(functions.compare, group, card=card, **options).value
    assert errors and not {name: error for name, (error, limit) in errors.items() if error > limit}


@pytest.mark.parametrize(
    ("group", "options"),
    [
        pytest.param("elements", {"schedule": "late"}, marks=pytest.mark.slow),
        pytest.param("sums", {}, marks=pytest.mark.slow),
        pytest.param("convolutions", {"schedule": "random", "seed": 1}, marks=pytest.mark.slow),
        ("halves", {"graphs": False}),
    ],
)
def test_functions_equal_jax_on_cpu(group, options):
    check_functions("v100", group, **options)


@pytest.mark.slow
@pytest.mark.parametrize("card", ["a100", "h100"])
@pytest.mark.parametrize("group", functions.GROUPS)
def test_functions_equal_jax_on_cpu_on_later_cards(card, group):
    check_functions(card, group)


def test_offloaded_steps_are_equal_to_the_bit_under_every_schedule():
    eager = stand_in.run(jax_programs.offload)
    copies = [
        line for line in eager.lines() if line[2] == "COPY" and line[-1] in ("kinds=12", "kinds=21")
    ]
    assert len(copies) >= 12  # down and up for at least three activations in each of two steps
    for schedule in ("late", "random"):
        assert stand_in.run(jax_programs.offload, schedule=schedule, seed=5).value == eager.value


def test_a_library_that_nobody_wrote_is_an_error_that_names_it():
    ran = stand_in.run(jax_programs.unwritten_library)
    assert "cufft" in ran.value.lower() or "fft_plan" in ran.value
    assert any(line[2] == "STUB" and line[3].startswith("cufft") for line in ran.lines())


def test_it_is_found_before_a_runtime_library_of_nvidia_s(tmp_path: Path):
    folder = tmp_path / "nvidia" / "cuda_runtime" / "lib"
    folder.mkdir(parents=True)
    source = tmp_path / "real.c"
    # What the real one says where there is no driver: 35, cudaErrorInsufficientDriver.
    source.write_text(
        "int cudaGetDeviceCount(int* n) { *n = 0; return 35; }\n"
        "int cudaRuntimeGetVersion(int* v) { *v = 1; return 35; }\n"
    )
    library = folder / "libcudart.so.12"
    command = [
        shutil.which("gcc") or "gcc",
        "-shared",
        "-fPIC",
        "-Wl,-soname,libcudart.so.12",
        "-o",
        str(library),
        str(source),
    ]
    subprocess.run(command, check=True)
    environment = {**stand_in.environment_of(), "LD_LIBRARY_PATH": str(folder)}
    environment["PYTHONPATH"] += f":{tmp_path}"
    ran = stand_in.run(jax_programs.describe, env=environment)
    assert ran.value["platform"] == "gpu"
