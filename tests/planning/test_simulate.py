"""What the simulator says, added up by hand: a byte of memory or link takes a second, and so does a FLOP."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings

from memplan.planning import devices
from memplan.planning.devices import Device
from memplan.planning.graph import Graph
from memplan.planning.plan import FENCE, Action, Kind, Plan
from memplan.planning.simulate import Simulator, Timeline, base_nbytes
from memplan.planning.unfold import Mode, keep_everything, unfold
from memplan.verify.plan import judge
from tests.planning.graphs import (
    DRAWS,
    UNIT,
    UNIT_GPU,
    Builder,
    chain,
    diamond,
    layout_of,
    random_decisions,
    random_graph,
    training_chain,
)  # fmt: skip


def run(graph: Graph, *actions: tuple[Kind, int] | Action, device: Device = UNIT) -> Timeline:
    plan = Plan(tuple(a if isinstance(a, Action) else Action(*a) for a in actions), "", "")
    return Simulator(graph, device).run(plan)


def compute(*ops: int) -> list[tuple[Kind, int]]:
    return [(Kind.COMPUTE, op) for op in ops]


def free(*values: int) -> list[tuple[Kind, int]]:
    return [(Kind.FREE, value) for value in values]


def peaks(timeline: Timeline) -> list[int]:
    return [moment.device_nbytes for moment in timeline.moments]


def test_a_kept_chain() -> None:
    graph = chain(3, nbytes=10)
    timeline = Simulator(graph, UNIT).run(keep_everything(layout_of(graph), ""))
    # argument and output are there from the beginning; between them two values, one segment at a time
    assert peaks(timeline) == [30, 40, 30]
    assert [moment.after_nbytes for moment in timeline.moments] == [30, 30, 20]
    assert [(m.start_s, m.end_s) for m in timeline.moments] == [(0, 20), (20, 40), (40, 60)]
    assert timeline.step_s == timeline.compute_s == 60
    assert [m.op for m in timeline.moments] == [0, 1, 2] and timeline.peak_op == 1


def test_an_output_may_take_a_donated_buffer() -> None:
    b = Builder()
    x = b.argument(10, donated=True)
    assert peaks(run(b.build(b.op([x], 10)), *compute(0))) == [10]


def test_a_returned_argument_is_counted_once() -> None:
    b = Builder()
    x = b.argument(10)
    b.op([x], 3)
    assert peaks(run(b.build(x, x), *compute(0), *free(1))) == [13]


def test_a_step_without_operations_still_holds_its_arguments() -> None:
    timeline = run(chain(0, nbytes=7))
    assert (timeline.peak_nbytes, timeline.step_s, timeline.peak_op) == (7, 0, -1)


def test_workspace_is_there_while_the_kernel_runs() -> None:
    b = Builder()
    made = b.op([b.argument(1)], 10, workspace_nbytes=100)
    timeline = run(b.build(b.op([made], 2)), *compute(0), FENCE, *compute(1), *free(made))
    assert peaks(timeline) == [1 + 2 + 10 + 100, 1 + 2 + 10]
    assert timeline.moments[0].after_nbytes == 13


def test_slack_is_added_where_its_operation_runs() -> None:
    graph = chain(2, nbytes=10)
    plan = keep_everything(layout_of(graph), "")
    assert peaks(Simulator(graph, UNIT, slack={1: 5}).run(plan)) == [30, 35]


def test_elementwise_work_melts_into_its_reader() -> None:
    b = Builder()
    x = b.argument(10)
    first = b.op([x], 10, "elementwise", flops=1.0)
    total = b.op([b.op([first], 10, "elementwise", flops=2.0)], 1, "reduction", flops=3.0)
    timeline = run(b.build(total), *compute(0, 1, 2), *free(1, 2))
    assert peaks(timeline) == [11]
    assert timeline.step_s == 11  # reads the argument, writes the sum


def test_melted_arithmetic_counts_where_it_outlasts_memory() -> None:
    b = Builder()
    first = b.op([b.argument(1)], 10, "elementwise", flops=500.0)
    assert run(b.build(b.op([first], 1, "reduction")), *compute(0, 1), *free(1)).step_s == 500


def test_elementwise_work_that_a_kernel_reads_has_a_buffer() -> None:
    b = Builder()
    first = b.op([b.argument(10)], 20, "elementwise")
    assert peaks(run(b.build(b.op([first], 1)), *compute(0, 1), *free(first))) == [31]


def test_a_single_elementwise_result_takes_over_a_buffer_that_ends() -> None:
    b = Builder()
    made = b.op([b.argument(1)], 10)
    relu = b.op([made], 10, "elementwise")
    graph = b.build(b.op([relu], 1))
    ends = run(graph, *compute(0), FENCE, *compute(1), *free(made), FENCE, *compute(2), *free(relu))
    assert peaks(ends) == [12, 12, 12]
    stays = run(graph, *compute(0), FENCE, *compute(1), FENCE, *compute(2), *free(relu, made))
    assert peaks(stays) == [12, 22, 22]


def test_results_that_outlive_the_segment_leave_in_one_fusion_at_its_end() -> None:
    b = Builder()
    made = b.op([b.argument(1)], 10)
    left, right = b.op([made], 10, "elementwise"), b.op([made], 10, "elementwise")
    last = b.op([left, right], 1)
    graph = b.build(last)
    timeline = run(graph, *compute(0, 1, 2), *free(made), FENCE, *compute(3), *free(left, right))
    assert peaks(timeline) == [2 + 10 + 20, 2 + 20]
    # the kernel reads 1 and writes 10; one fusion reads 10 and writes 20; the last reads 20 and writes 1
    assert [m.end_s for m in timeline.moments] == [11 + 30, 41 + 21]


def test_a_result_of_several_takes_over_a_buffer_that_no_other_result_is_computed_from() -> None:
    b = Builder()
    logits, other = b.op([b.argument(1)], 10), b.op([b.argument(1)], 3)
    first, second = b.op([logits], 10, "elementwise"), b.op([other], 3, "elementwise")
    shared = b.op([logits, other], 2, "elementwise")
    graph = b.build(b.op([first, second, shared], 1))
    ends = free(logits, other)

    def peak(*ops: int) -> int:
        """Of a fusion of these results, behind the two kernels that make what they are computed from."""
        left = [graph.ops[op].outputs[0] for op in {2, 3, 4} - set(ops)]
        return peaks(run(graph, *compute(0, 1), FENCE, *compute(2, 3, 4), *free(*left), *ends))[1]

    assert peak(2, 3) == 3 + 13  # both take over
    assert peak(2, 3, 4) == 3 + 13 + 15  # every input is behind two results
    assert peak(3, 4) == 3 + 13 + 5


@pytest.mark.parametrize(
    ("capability", "facts", "library"),
    [
        (None, {"name": "conv_general_dilated", "flops_dtype": "float32"}, False),
        ((9, 0), {"name": "conv_general_dilated", "flops_dtype": "float32"}, True),
        ((7, 0), {"name": "dot_general", "flops_dtype": "float32"}, True),
        ((8, 0), {"name": "dot_general", "flops_dtype": "float32"}, False),
        ((7, 0), {"name": "sort"}, False),
    ],
)
def test_what_a_library_made_is_not_written_over(capability: Any, facts: Any, library: bool) -> None:
    v100 = devices.named("v100").target
    assert v100 is not None
    target = None if capability is None else replace(v100, compute_capability=capability)
    b = Builder()
    made = b.op([b.argument(1)], 10, **facts)
    relu = b.op([made], 10, "elementwise")
    graph = b.build(b.op([relu], 1))
    timeline = run(
        graph, *compute(0, 1), *free(made), FENCE, *compute(2), *free(relu), device=replace(UNIT, target=target)
    )
    assert peaks(timeline) == [22 if library else 12, 12]


@pytest.mark.parametrize(("device", "peak"), [(UNIT, 12), (UNIT_GPU, 22)])
def test_what_came_through_a_fence_is_not_written_over(device: Device, peak: int) -> None:
    b = Builder()
    made = b.op([b.argument(1)], 10)
    relu = b.op([made], 10, "elementwise")
    graph = b.build(b.op([relu], 1))
    actions = *compute(0), FENCE, *compute(1), *free(made), FENCE, *compute(2), *free(relu)
    assert peaks(run(graph, *actions, device=device)) == [12, peak, 12]


@pytest.mark.parametrize("results", [1, 2])
def test_one_of_several_results_is_not_written_over(results: int) -> None:
    b = Builder()
    made, *rest = b.ops_of([b.argument(1)], (10, 1)[:results])
    relu = b.op([made], 10, "elementwise")
    graph = b.build(b.op([relu], 1))
    timeline = run(graph, *compute(0, 1), *free(made, *rest), FENCE, *compute(2), *free(relu))
    assert timeline.moments[0].device_nbytes == 2 + 10 * results


def test_what_fusions_of_a_segment_make_and_read_is_not_written_over() -> None:
    """They become one with several results."""
    b = Builder()
    summed = b.op([b.argument(1)], 10, "elementwise")
    product = b.op([summed], 1)
    relu = b.op([summed], 10, "elementwise")
    graph = b.build(b.op([relu], 1))
    timeline = run(graph, *compute(0, 1, 2), *free(summed, product), FENCE, *compute(3), *free(relu))
    assert timeline.moments[0].device_nbytes == 2 + 20


def test_a_copy_from_the_host_is_not_written_over() -> None:
    b = Builder()
    made = b.op([b.argument(1)], 10)
    relu = b.op([made], 10, "elementwise")
    graph = b.build(b.op([relu], 1))
    away = [*compute(0), (Kind.OFFLOAD, made), FENCE, (Kind.FREE, made), FENCE]
    back = [(Kind.PREFETCH, made), *compute(1), *free(made), (Kind.RELEASE, made), FENCE, *compute(2), *free(relu)]
    assert peaks(run(graph, *away, *back))[2] == 2 + 20


def test_what_leaves_for_the_host_is_written_even_if_it_leaves_at_once() -> None:
    b = Builder()
    made = b.op([b.argument(1)], 10)
    light, sums = b.op([made], 10, "elementwise"), b.op([made], 4, "reduction", along_rows=True)
    graph = b.build(b.op([light, sums], 1))
    away = [(Kind.OFFLOAD, light), (Kind.OFFLOAD, sums), *free(light, sums, made), FENCE]
    back = [(Kind.PREFETCH, light), (Kind.PREFETCH, sums), *compute(3), *free(light, sums)]
    ampere = replace(UNIT, target=devices.named("a100").target)
    first = run(graph, *compute(0, 1, 2), *away, *back, device=ampere).moments[0]
    assert first.end_s - first.start_s - first.stall_s == 11 + 20 + 14


def normalized(rows: bool) -> Graph:
    """Values: 1 scores, 2 their largest, 3 the shifted ones, 4 their sum, 5 the weights, 6 what a kernel makes of 5."""
    b = Builder()
    scores = b.op([b.argument(1)], 10)
    largest = b.op([scores], 1, "reduction", along_rows=rows)
    shifted = b.op([scores, largest], 10, "elementwise")
    total = b.op([shifted], 1, "reduction", along_rows=rows)
    return b.build(b.op([b.op([shifted, total], 10, "elementwise")], 1))


@pytest.mark.parametrize(("rows", "leaves", "passes"), [(True, False, 1), (False, False, 3), (True, True, 3)])
def test_statistics_of_rows_come_from_the_kernel_that_normalizes_them(rows: bool, leaves: bool, passes: int) -> None:
    graph = normalized(rows)
    ends = [1, 3] if leaves else [1, 2, 3, 4]
    last = [2, 4] if leaves else []
    actions = *compute(0), FENCE, *compute(1, 2, 3, 4), *free(*ends), FENCE, *compute(5), *free(5, *last)
    plan = Plan(tuple(a if isinstance(a, Action) else Action(*a) for a in actions), "", "")
    ampere = replace(UNIT, target=devices.named("a100").target)
    second = Simulator(graph, ampere).run(plan).moments[1]
    statistics = 2 + 3 if passes == 3 else 0  # both written, the largest read twice and the sum once
    assert second.end_s - second.start_s == 10 * passes + statistics + 10
    without = Simulator(graph, UNIT).run(plan).moments[1]
    assert without.end_s - without.start_s == 3 * 10 + 5 + 10


def test_views_cost_nothing_unless_they_grow_and_a_kernel_reads_them() -> None:
    b = Builder()
    made = b.op([b.argument(1)], 10)
    same, grown = b.op([made], 10, "view"), b.op([made], 70, "view")
    graph = b.build(b.op([same], 1), b.op([grown], 1))
    actions = [*compute(0), FENCE, *compute(1, 3), *free(same), FENCE, *compute(2, 4), *free(grown, made)]
    assert peaks(run(graph, *actions)) == [13, 13, 83]


def test_an_offload_overlaps_and_its_free_waits() -> None:
    graph = training_chain([10, 10])  # 0 argument, 1 and 2 forward, 3 loss, 4 and 5 backward
    timeline = run(
        graph, *compute(0), (Kind.OFFLOAD, 1), FENCE, *compute(1), *free(1), FENCE,
        *compute(2), *free(2), FENCE, (Kind.PREFETCH, 1), *compute(3), *free(3, 1), (Kind.RELEASE, 1), FENCE,
        *compute(4), *free(4),
    )  # fmt: skip
    out, back = timeline.copies
    assert (out.value, out.direction, out.start_s, out.end_s) == (1, Kind.OFFLOAD, 20, 30)  # behind its kernel
    assert (back.direction, back.start_s, back.end_s) == (Kind.PREFETCH, 60, 70)
    # the fourth segment reads value 1 at once: it waits for the whole copy, then reads 20 and writes 10
    assert [m.stall_s for m in timeline.moments] == [0, 0, 0, 10, 0]
    assert [m.end_s - m.start_s for m in timeline.moments] == [20, 20, 20, 40, 30]
    assert timeline.compute_s == timeline.step_s - 10
    assert [m.host_nbytes for m in timeline.moments] == [0, 10, 10, 10, 0]  # from where value 1 leaves the device
    assert timeline.host_peak_nbytes == 10
    assert peaks(timeline) == [30, 40, 40, 50, 30]
    # value 1 leaves with the second segment, although its reader is done before
    assert [m.after_nbytes for m in timeline.moments] == [30, 30, 30, 30, 20]


def test_a_free_that_comes_before_its_copy_is_done_stalls_the_segment() -> None:
    b = Builder()
    made = b.op([b.argument(1)], 50)
    graph = b.build(b.op([made], 1))
    timeline = run(
        graph, *compute(0), (Kind.OFFLOAD, made), *free(made), FENCE,
        (Kind.PREFETCH, made), *compute(1), *free(made),
    )  # fmt: skip
    assert [m.stall_s for m in timeline.moments] == [50, 50]
    assert timeline.step_s == 51 + 50 + 50 + 51


def test_copies_in_one_direction_queue() -> None:
    b = Builder()
    x = b.argument(1)
    left, right = b.op([x], 10), b.op([x], 10)
    timeline = run(b.build(x), *compute(0, 1), (Kind.OFFLOAD, left), (Kind.OFFLOAD, right))
    assert [(c.start_s, c.end_s) for c in timeline.copies] == [(22, 32), (32, 42)]
    assert timeline.step_s == 42


def test_host_bytes_are_the_most_inside_a_segment() -> None:
    b = Builder()
    x = b.argument(1)
    left, right = b.op([x], 10), b.op([x], 10)
    timeline = run(
        b.build(x), *compute(0, 1), (Kind.OFFLOAD, left), *free(left), FENCE, (Kind.OFFLOAD, right), *free(right),
        (Kind.RELEASE, left), FENCE, (Kind.RELEASE, right),
    )  # fmt: skip
    assert [m.host_nbytes for m in timeline.moments] == [10, 20, 10]


def test_a_host_copy_that_nothing_waits_for_takes_no_host_memory_before_it_is_used() -> None:
    b = Builder()
    made = b.op([b.argument(1)], 10)
    graph = b.build(b.op([made], 1))
    timeline = run(graph, *compute(0), (Kind.OFFLOAD, made), FENCE, *compute(1), FENCE, (Kind.RELEASE, made))
    assert [m.host_nbytes for m in timeline.moments] == [0, 0, 10]


def plan_of(draw: random.Random, graph: Graph, modes: tuple[Mode, ...] = tuple(Mode)) -> Plan:
    layout = layout_of(graph, draw.choice([1, 15, 1000]))
    return Plan(unfold(layout, random_decisions(draw, layout, modes))[0], graph.fingerprint, "test")


@settings(max_examples=60, deadline=None)
@given(DRAWS)
def test_segments_seen_before_cost_the_same(draw: random.Random) -> None:
    graph = random_graph(draw)
    used = Simulator(graph, UNIT)
    for _ in range(3):
        plan = plan_of(draw, graph)
        assert used.run(plan) == Simulator(graph, UNIT).run(plan) == used.run(plan)


@settings(max_examples=150, deadline=None)
@given(DRAWS)
def test_bytes_are_conserved(draw: random.Random) -> None:
    """At the end stand the arguments, the outputs, and what outputs are views of."""
    graph = random_graph(draw)
    layout, simulator = layout_of(graph, draw.choice([1, 15, 1000])), Simulator(graph, UNIT)
    decisions = {
        (value, number): mode
        for (value, number), mode in random_decisions(draw, layout).items()
        if value not in layout.returned
        and not layout.returned.intersection(graph.ops[graph.producer[value] or 0].outputs)
    }
    timeline = simulator.run(Plan(unfold(layout, decisions)[0], "", ""))
    assert timeline.moments[-1].after_nbytes == base_nbytes(graph) + sum(
        map(simulator.graph.passing_nbytes, layout.returned)
    )


@settings(max_examples=150, deadline=None)
@given(DRAWS)
def test_times_and_host_bytes_hold_together(draw: random.Random) -> None:
    graph = random_graph(draw)
    plan = plan_of(draw, graph)
    timeline = Simulator(graph, UNIT).run(plan)
    assert timeline.host_peak_nbytes <= judge(plan, graph).host_peak_nbytes  # whose copies take memory at once
    assert all(before.end_s == after.start_s for before, after in pairwise(timeline.moments))
    assert all(m.stall_s >= -1e-9 and m.end_s >= m.start_s + m.stall_s for m in timeline.moments)
    assert timeline.step_s >= timeline.compute_s - 1e-9
    for direction in (Kind.OFFLOAD, Kind.PREFETCH):
        copies = [copy for copy in timeline.copies if copy.direction is direction]
        assert all(a.end_s <= b.start_s for a, b in pairwise(copies))
        assert all(c.end_s - c.start_s == pytest.approx(graph.nbytes(c.value)) for c in copies)
    arrived = {c.value: c.end_s for c in timeline.copies if c.direction is Kind.OFFLOAD}
    assert all(c.start_s >= arrived[c.value] for c in timeline.copies if c.direction is Kind.PREFETCH)


@settings(max_examples=150, deadline=None)
@given(DRAWS)
def test_kernels_alone_need_what_the_judge_counts_and_outputs_from_the_beginning(draw: random.Random) -> None:
    """Nothing melts here and nothing waits for a copy: both add the same bytes, the judge without the outputs' head
    start and with a buffer for every output, donated or not."""
    graph = random_graph(draw, kernels_only=True)
    plan = plan_of(draw, graph, (Mode.DROP,))
    simulated = Simulator(graph, UNIT)
    early = base_nbytes(graph) - graph.resident_nbytes
    counted = judge(plan, graph).peak_nbytes
    assert simulated.run(plan).peak_nbytes <= counted + early
    undonated = replace(graph, values=tuple(replace(value, donated=False) for value in graph.values))
    assert counted <= Simulator(undonated, UNIT).run(plan).peak_nbytes


def test_diamond_holds_both_sides() -> None:
    graph = diamond(nbytes=10)
    assert peaks(Simulator(graph, UNIT).run(keep_everything(layout_of(graph), ""))) == [30, 40, 50, 40]
