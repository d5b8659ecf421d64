"""Asynchronous collectives as kernels and buffers: in place, synchronous, gathered again."""

from __future__ import annotations

from memplan.compilation.scheduled import ScheduledModule
from memplan.hardware.backend import GPU
from memplan.planning.legal import fault
from memplan.planning.problem import Problem
from memplan.planning.schedule import runs
from memplan.planning.search.tape import record
from memplan.verify.same_module import judge
from memplan.xla.buffers import problem_of
from memplan.xla.collectives.pairs import as_synchronous, synchronous_pairs
from memplan.xla.module import Module
from memplan.xla.write import write
from tests.xla.collective_modules import A100, ALL, EIGHT, fusion, gathered, module, summed
from tests.xla.small_modules import BIG, MIB

SHARD = "f32[64,1024]{1,0}"
OUT = f"ROOT %out = {BIG} fusion(%last, %a), kind=kLoop, calls=%fused_add"


def kernels(problem: Problem) -> dict[str, int]:
    return {kernel.name: number for number, kernel in enumerate(problem.kernels)}


def test_pairs_with_nothing_beside_them_are_synchronous() -> None:
    first, second = summed("s", "x"), summed("t", "y")
    producers = fusion("x", "a", "b"), fusion("y", "a", "b")
    view = f"%seen = {BIG} bitcast(%a)"
    last = fusion("last", "s.done", "t.done")
    nested_pairs = module(*producers, first[0], second[0], view, second[1], first[1], last, OUT)
    assert synchronous_pairs(nested_pairs.entry) == {"s": "s.done", "t": "t.done"}
    apart = module(producers[0], first[0], producers[1], second[0], second[1], first[1], last, OUT)
    assert synchronous_pairs(apart.entry) == {"t": "t.done"}
    ops = apart.entry.ops
    whole = as_synchronous(ops["t"], ops["t.done"])
    assert (whole.opcode, whole.shape, whole.operands) == (
        "all-reduce",
        ops["t.done"].shape,
        ("y",),
    )
    assert (whole.groups(8), whole.to_apply) == ((tuple(range(8)),), "plus")
    assert ops["t"].aliased_outputs and not whole.aliased_outputs


def test_a_sum_beside_a_kernel_is_in_place() -> None:
    start, done = summed("s", "x")
    hlo = module(
        fusion("x", "a", "b"),
        start,
        fusion("y", "a", "b"),
        done,
        fusion("last", "s.done", "y"),
        OUT,
    )
    problem = problem_of(hlo, backend=GPU)
    place = {buffer.name: buffer.alias_set for buffer in problem.buffers}
    assert place["s{1}"] == place["x"] != place["y"]
    number = kernels(problem)
    assert problem.kernels[number["s.done"]].started_by == number["s"]
    assert not problem.kernels[number["s"]].recomputable
    tables = 2 * 256  # of the start's tuple, and of the operands in it
    # y is in the result's
    assert ScheduledModule(hlo, A100, EIGHT).packing.nbytes == 2 * MIB + tables


def test_a_sum_of_several_is_in_place_in_each() -> None:
    shapes = f"({BIG}, {BIG})"
    start = (
        f"%s = ({shapes}, {shapes}) all-reduce-start(%x, %y), {ALL}, to_apply=%plus, "
        "output_to_operand_aliasing={{1, 0}: (0, {}), {1, 1}: (1, {})}"
    )
    parts = (f"%s.{n} = {BIG} get-tuple-element(%s.done), index={n}" for n in range(2))
    done, last = f"%s.done = {shapes} all-reduce-done(%s)", fusion("last", "s.0", "s.1")
    producers = fusion("x", "a", "b"), fusion("y", "a", "b")
    hlo = module(*producers, start, fusion("z", "a", "b"), done, *parts, last, OUT)
    problem = problem_of(hlo, backend=GPU)
    place = {buffer.name: buffer.alias_set for buffer in problem.buffers}
    assert (place["s{1,0}"], place["s{1,1}"]) == (place["x"], place["y"])
    reads = problem.kernels[kernels(problem)["last"]].reads
    assert [problem.buffers[read].name for read in reads] == ["s{1,0}", "s{1,1}"]


def test_a_synchronous_sum_is_one_kernel_whose_buffer_its_reader_may_take() -> None:
    start, done = summed("s", "x")
    hlo = module(fusion("x", "a", "b"), start, done, fusion("last", "s.done", "a"), OUT)
    problem = problem_of(hlo, backend=GPU)
    number, buffers = kernels(problem), {buffer.name: n for n, buffer in enumerate(problem.buffers)}
    assert "s.done" not in number
    assert problem.kernels[number["s"]].may_alias[buffers["s"]] == (buffers["x"],)
    assert buffers["s"] in problem.kernels[number["last"]].may_alias[buffers["last"]]
    assert ScheduledModule(hlo, A100, EIGHT).packing.nbytes == 0  # all of them in the result


def gathering() -> Module:
    """A shard is gathered around a kernel, and read twice."""
    start, done = gathered("g", "w", SHARD)
    shard = f"%w = {SHARD} slice(%a), slice={{[0:64], [0:1024]}}"
    middle = fusion("x", "g.done", "b"), fusion("y", "x", "b"), fusion("last", "y", "g.done")
    return module(
        shard, start, fusion("beside", "a", "b"), done, *middle, OUT.replace("%a", "%beside")
    )


def test_a_gather_runs_again_as_a_whole_behind_its_end() -> None:
    plain = gathering()
    problem = problem_of(plain, backend=GPU)
    number = kernels(problem)
    gather, tape = number["g"], record(problem)
    assert problem.kernels[gather].recomputable
    done = number["g.done"]
    assert [tape.may_recompute(gather, slot) for slot in (done, done + 1)] == [False, True]
    order = [*range(number["last"]), gather, *range(number["last"], len(number))]
    assert fault(problem, runs(order)) is None
    planned = write(plain, problem, runs(order))
    judge(plain, planned)
    names = list(planned.entry.ops)
    at = names.index("g.run2")
    assert names[at + 1] == "g.done.run2"
    assert planned.entry.ops["g.done.run2"].operands == ("g.run2",)
    assert planned.entry.ops["last"].operands == ("y", "g.done.run2")
    assert synchronous_pairs(planned.entry) == {"g.run2": "g.done.run2"}
    early = [*range(done), gather, *range(done, len(number))]
    assert fault(problem, runs(early)) == "g runs again before its end"


def test_what_a_pair_reads_stays_until_its_end() -> None:
    """The shard of a gather under way cannot be made again."""
    problem = problem_of(gathering(), backend=GPU)
    number, tape = kernels(problem), record(problem)
    shard, done = number["w"], number["g.done"]
    assert [tape.may_recompute(shard, slot) for slot in (number["g"], done, done + 1)] == [
        True,
        False,
        True,
    ]
    order = [*range(done), shard, *range(done, len(number))]
    assert (
        fault(problem, runs(order)) == "w runs again while an asynchronous pair reads what it made"
    )


def test_a_gather_takes_the_seconds_of_its_collective() -> None:
    timed = ScheduledModule(gathering(), A100, EIGHT).timed_problem
    ((sent, count),) = ScheduledModule(gathering(), A100, EIGHT).replay.collectives.items()
    assert count == 1
    assert timed.kernels[kernels(timed)["g"]].seconds == sent.seconds > 0
