"""Loops over slabs in a report, against the loops that the step and the budget imply."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import memplan
from memplan.hardware import catalog
from memplan.hardware.roofline import copy_seconds
from memplan.planning.slabs.slabs import Slabs
from memplan.program.slabs.choose import SlabCandidate, SlabChoices
from memplan.program.slabs.write import axis_at, with_slabs
from memplan.program.trace import Program, trace
from memplan.report.model import Report
from memplan.report.slabs import SlabArray
from memplan.results.infeasible import longest_axis, unsplit
from memplan.stages import Planned
from tests import vocabulary
from tests.vocabulary import LOGITS_BYTES, TOKENS, WIDTH, WORDS
from tests.within import WITHIN

SIDE, CHANNELS, MIB = 512, 16, 2**20
ARRAY_BYTES = 4 * SIDE * SIDE * CHANNELS


def images(kernels: Any, x: jax.Array) -> Any:
    """A step of two convolutions and a norm between them, whose sums separate the loops."""

    def conv(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def loss(kernels: Any) -> jax.Array:
        y = conv(x, kernels[0])
        y = jnp.tanh(y / jnp.sqrt((y * y).mean((1, 2), keepdims=True)))
        return (conv(y, kernels[1]) ** 2).mean()

    value, gradient = jax.value_and_grad(loss)(kernels)
    return jax.tree.map(lambda w, g: w - 0.1 * g, kernels, gradient), value


def image_shapes() -> Any:
    shapes = (3, 3, 1, CHANNELS), (3, 3, CHANNELS, 1), (1, SIDE, SIDE, 1)
    first, second, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    return [first, second], x


@pytest.fixture(scope="module")
def tokens() -> Planned:
    return memplan.jit(vocabulary.step, budget=vocabulary.IN_SLABS, donate_argnums=0).plan(
        *vocabulary.shapes()
    )


@pytest.fixture(scope="module")
def planes() -> Planned:
    return memplan.jit(images, device="v100", budget=8 * MIB, donate_argnums=0).plan(
        *image_shapes()
    )


def test_the_logits_never_exist(tokens: Planned) -> None:
    report = tokens.report
    assert (report.status, report.planner) == ("fits", "slabs")
    assert report.compiled_peak_bytes <= vocabulary.IN_SLABS < LOGITS_BYTES
    assert (
        max(array.nbytes for loop in report.slab_loops for array in loop.writes)
        < LOGITS_BYTES / WORDS * 2
    )
    verdicts = {candidate.name: candidate.verdict for candidate in report.candidates}
    expected = {"plain": "over the device budget", "kernels": "does not fit", "slabs": "chosen"}
    assert [*verdicts.items()] == [*expected.items()]


def test_the_row_of_a_loop_over_tokens(tokens: Planned) -> None:
    [loop] = tokens.report.slab_loops
    assert (loop.number, loop.axis) == (1, f"dimension 0 of float32[{TOKENS},{WORDS}]")
    assert loop.trips * loop.rows == TOKENS and loop.halo == 0
    assert loop.sums == 2  # the gradients of both weights
    assert loop.source.startswith("tests/vocabulary.py:") and loop.seconds > 0
    read = {
        array.name: (array.shape, array.dtype, array.nbytes, array.place) for array in loop.reads
    }
    assert read["x"] == ((TOKENS, WIDTH), "float32", 4 * TOKENS * WIDTH, "device")
    assert {array.shape[0] for array in (*loop.reads, *loop.writes)} == {TOKENS}


def test_arrays_that_slabs_write_are_decisions(tokens: Planned) -> None:
    [loop] = tokens.report.slab_loops
    split = [decision for decision in tokens.report.decisions if decision.decision == "split"]
    assert [decision.name for decision in split] == [
        f"{array.name} in {loop.trips} slabs" for array in loop.writes
    ]
    shapes = [(decision.shape, decision.nbytes) for decision in split]
    assert shapes == [(array.shape, array.nbytes) for array in loop.writes]
    assert {decision.seconds for decision in split} == {0.0}
    assert all(decision.source.startswith("tests/vocabulary.py:") for decision in split)


def check_written_and_read(report: Report) -> None:
    assert Report.from_json(report.to_json()) == report
    assert (
        "Loops over slabs: dimension" in str(report)
        and "Loops over slabs: dimension" in report.to_html()
    )
    drawn = {instant.layer.partition("/")[0] for instant in report.timeline.instants}
    assert drawn >= {f"slabs_{loop.number}" for loop in report.slab_loops}
    spans = {block.name: block for block in report.timeline.blocks if block.kind == "slabs"}
    trips = {name.rpartition("/")[2]: span.count for name, span in spans.items()}
    assert trips == {f"slabs_{loop.number}": loop.trips for loop in report.slab_loops}
    for loop in report.slab_loops:
        (span,) = (block for name, block in spans.items() if name.endswith(f"slabs_{loop.number}"))
        assert span.end_s - span.start_s == pytest.approx(loop.seconds)


def test_loops_are_in_every_view(tokens: Planned) -> None:
    check_written_and_read(tokens.report)


def test_an_unsplit_step_has_no_rows() -> None:
    report = memplan.jit(vocabulary.step).plan(*vocabulary.shapes()).report
    assert (
        report.status == "untouched"
        and report.slab_loops == report.unsplit == ()
        and report.huge_arrays is None
    )


@pytest.mark.gpu_aot
def test_loops_over_planes_have_a_halo_and_walls_between_them(planes: Planned) -> None:
    report = planes.report
    assert report.status == "fits" and len(report.slab_loops) > 1
    assert [loop.number for loop in report.slab_loops] == list(range(1, len(report.slab_loops) + 1))
    for loop in report.slab_loops:
        assert loop.axis == f"dimension 1 of float32[1,{SIDE},{SIDE},{CHANNELS}]"
        assert loop.trips * loop.rows == SIDE
        # Rows around a slab: of one 3x3 convolution, up to two of them with their gradients.
        assert 1 <= loop.halo <= 4
    # the norm behind the first convolution
    assert report.slab_loops[0].halo == 1 and report.slab_loops[0].sums == 1
    seconds = [loop.seconds or 0.0 for loop in report.slab_loops]
    assert min(seconds) > 0 and sum(seconds) <= (report.predicted_step_s or 0) * 1.001
    assert report.recomputed_flops > 0  # the first convolution is made again behind the wall
    assert report.huge_arrays == 0
    check_written_and_read(report)


@pytest.mark.gpu_aot
def test_host_arrays_of_slabs_are_in_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first convolution is written to the host, and read by both loops behind it."""

    choose_only(monkeypatch, on_host)
    report = (
        memplan.jit(images, device="v100", budget=16 * MIB, donate_argnums=0)
        .plan(*image_shapes())
        .report
    )
    written = SlabArray(
        "conv_general_dilated:0", (1, SIDE, SIDE, CHANNELS), "float32", ARRAY_BYTES, "host"
    )
    assert [loop.writes for loop in report.slab_loops] == [(written,), (), ()]
    assert [written in loop.reads for loop in report.slab_loops] == [False, True, True]
    slab = report.slab_loops[0].rows * SIDE * CHANNELS * 4
    assert report.offloaded_bytes == ARRAY_BYTES + slab  # the first trip writes spare rows
    spare_rows = 2 * report.slab_loops[0].rows + 2  # a slab before, a slab with its halo behind
    assert report.host_peak_bytes == ARRAY_BYTES + spare_rows * SIDE * CHANNELS * 4
    [split] = (decision for decision in report.decisions if decision.decision == "split")
    assert split.name == f"conv_general_dilated:0 in {report.slab_loops[0].trips} slabs on the host"
    assert split.seconds == pytest.approx(3 * copy_seconds(ARRAY_BYTES, catalog.named("v100")))
    assert report.copy_s > 0
    assert "16.0 MiB host" in str(report)


@pytest.mark.gpu_aot
def test_a_share_of_a_host_array_is_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first convolution: 16 of the 64 rows of each slab."""

    def split(program: Program) -> Slabs:
        slabs = on_host(program)
        [value] = slabs.on_host
        return replace(slabs, on_device=frozenset({(value, 16)}))

    choose_only(monkeypatch, split)
    report = memplan.jit(images, device="v100", budget=16 * MIB).plan(*image_shapes()).report
    convolution = SlabArray(
        "conv_general_dilated:0", (1, SIDE, SIDE, CHANNELS), "float32", ARRAY_BYTES, "host"
    )
    parts = (
        replace(convolution, nbytes=ARRAY_BYTES // 4, place="device"),
        replace(convolution, nbytes=3 * ARRAY_BYTES // 4),
    )
    assert [loop.writes for loop in report.slab_loops] == [parts, (), ()]
    assert [set(parts) <= set(loop.reads) for loop in report.slab_loops] == [False, True, True]
    assert [(loop.copies, loop.kernels) for loop in report.slab_loops] == [(1, 0)] * 3
    row = SIDE * CHANNELS * 4
    assert report.offloaded_bytes == 3 * ARRAY_BYTES // 4 + 48 * row  # the first trip's spare rows
    [stored] = (decision for decision in report.decisions if decision.decision == "split")
    trips = report.slab_loops[0].trips
    assert stored.name == f"conv_general_dilated:0 in {trips} slabs, 75% of each on the host"
    copy_s = copy_seconds(3 * ARRAY_BYTES // 4, catalog.named("v100"))
    assert stored.seconds == pytest.approx(3 * copy_s)


@pytest.mark.gpu_aot
def test_a_loop_that_takes_two_slabs_in_a_trip_fetches_both_by_one_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first loop, which writes to the host, and the last."""

    def wide(program: Program) -> Slabs:
        return replace(on_host(program), at_once=frozenset({(0, 2), (2, 2)}))

    choose_only(monkeypatch, wide)
    report = memplan.jit(images, device="v100", budget=32 * MIB).plan(*image_shapes()).report
    assert [loop.trips for loop in report.slab_loops] == [4, 8, 4]
    assert [loop.rows for loop in report.slab_loops] == [SIDE // 4, SIDE // 8, SIDE // 4]
    assert [(loop.copies, loop.kernels) for loop in report.slab_loops] == [(1, 0)] * 3
    assert max(loop.halo for loop in report.slab_loops) <= 4
    [stored] = (decision for decision in report.decisions if decision.decision == "split")
    assert stored.name == "conv_general_dilated:0 in 4 slabs on the host"
    check_written_and_read(report)


def choose_only(monkeypatch: pytest.MonkeyPatch, slabs: Callable[[Program], Slabs]) -> None:
    """Have memplan choose the given slabs of a program, and no others."""

    def programs(choices: SlabChoices, *_: object) -> list[SlabCandidate]:
        program = choices.program
        return [SlabCandidate((), 0, 1.0, lambda: with_slabs(program, slabs(program)))]

    monkeypatch.setattr(SlabChoices, "programs", programs)


def on_host(program: Program) -> Slabs:
    """All values on the axis in eight slabs, the first convolution on the host."""
    [value] = (
        n for n, var in enumerate(program.flat.values) if var is program.flat.eqns[0].outvars[0]
    )
    stored, along = frozenset({value}), axis_at(program.flat, value, 1).graph.along
    return Slabs(value, 1, SIDE // 8, frozenset(along), stored, stored)


@pytest.mark.gpu_aot
def test_arrays_that_cudnn_does_not_accept_are_listed() -> None:
    x = jax.ShapeDtypeStruct((1, 2**15, 2**16, 1), jnp.float32)
    report = memplan.jit(lambda x: (x * 2).sum(), device="h200").plan(x).report
    assert report.huge_arrays == 1 and math.prod(x.shape) == 2**31
    assert "1 array of it has 2^31 elements or more" in str(report)


def test_unsplit_operations_are_named_with_their_lines_once() -> None:
    def step(x: jax.Array) -> jax.Array:
        y = jnp.tanh(x) @ jnp.ones((8, 8))
        return sum(jnp.sort(y + number, axis=0) for number in range(3))[::2].sum()  # type: ignore[index]

    program = trace(step, (jax.ShapeDtypeStruct((64, 8), jnp.float32),), {}, {})
    axis = longest_axis(program)
    assert axis.transform.ops == frozenset() and axis.transform.dim == 0
    [row] = unsplit([axis], 9)
    assert (row.name, row.nbytes) == ("sort", 2 * 4 * 64 * 8) and "test_slabs.py:" in row.source


def test_a_step_without_arrays_has_no_axis() -> None:
    assert (
        longest_axis(trace(lambda x: x + 1, (jax.ShapeDtypeStruct((), jnp.float32),), {}, {}))
        is None
    )


@pytest.mark.gpu_aot
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name != "body, branch, body"))
        for name in WITHIN
    ],
)
def test_slabs_inside_of_branches_and_bodies(name: str) -> None:
    """With their copies to the host, and where they are."""

    def flat(kernels: Any, x: jax.Array) -> Any:
        return images(kernels, x[None, :, :, None])

    kernels, _ = image_shapes()
    shapes = kernels, jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float32)
    report = (
        memplan.jit(WITHIN[name](flat), device="v100", budget=10 * MIB, donate_argnums=0)
        .plan(*shapes)
        .report
    )
    assert report.compiled_peak_bytes <= 10 * MIB < ARRAY_BYTES
    assert [loop.number for loop in report.slab_loops] == list(range(1, len(report.slab_loops) + 1))
    # the norm and the loss are walls, and the gradient comes after them
    assert len(report.slab_loops) >= 3
    where = "cond" if name == "branch" else "scan"
    assert all(f" in the {where} (tests/within.py:" in loop.axis for loop in report.slab_loops)
    on_host = [
        loop
        for loop in report.slab_loops
        for array in (*loop.reads, *loop.writes)
        if array.place == "host"
    ]
    assert all(loop.copies + loop.kernels for loop in on_host)
    assert all(loop.seconds for loop in report.slab_loops)
