"""Bytes of schedules: shared memory, temporaries in arguments, and live bytes."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from memplan.hardware.backend import GPU
from memplan.planning.packing import HeapGroups, Packing, heap_nbytes, live_nbytes, pack
from memplan.planning.problem import Buffer, Kernel, Problem, Role
from memplan.planning.schedule import runs
from tests.planning.small import actions, problem

KIB = 1024


CHAIN = ([], [0], [1], [2], [3])


def test_what_a_kernel_reads_and_what_it_writes_are_apart() -> None:
    assert pack(problem(CHAIN, [KIB] * 5)).nbytes == 2 * KIB


def test_an_operand_of_this_size_that_ends_may_be_written_over() -> None:
    over = {1: (0,), 2: (1,), 3: (2,), 4: (3,)}
    assert pack(problem(CHAIN, [KIB] * 5, over=over)).nbytes == KIB
    read_later = problem([[], [0], [1, 0]], [KIB] * 3, over={1: (0,), 2: (1,)})
    assert pack(read_later).nbytes == 2 * KIB
    assert pack(problem([[], [0]], [KIB, 2 * KIB], over={1: (0,)})).nbytes == 3 * KIB


def test_what_is_updated_in_place_is_there_once() -> None:
    assert pack(problem([[], [0], [1]], [KIB] * 3, alias_sets={1: 0, 2: 0})).nbytes == KIB


def test_a_donated_argument_holds_temporaries_once_it_has_been_read() -> None:
    chain = [[0], [1], [2]]  # the argument is free when the second of three temporaries is made
    donated = pack(problem(chain, [KIB] * 3, arguments=[KIB], donated=[0]))
    assert (donated.nbytes, donated.reused_nbytes) == (KIB, KIB)
    kept = pack(problem(chain, [KIB] * 3, arguments=[KIB]))
    assert (kept.nbytes, kept.reused_nbytes) == (2 * KIB, 0)


def test_an_output_is_no_temporary_and_holds_others_before_it_is_made() -> None:
    packing = pack(problem([[], [0], [1]], [KIB, 8, KIB], outputs=[2]))
    assert packing.nbytes == 8
    assert packing.reused_nbytes == KIB


def test_of_two_that_may_lie_under_a_result_the_first_that_it_reads_does() -> None:
    sizes = [2 * KIB, KIB, 2 * KIB, KIB, KIB]
    over = {4: (1, 3)}

    def reading(*last: int) -> Packing:
        return pack(problem([[], [0], [0], [2], last], sizes, outputs=[4], over=over))

    assert reading(3, 1).nbytes == 5 * KIB  # of these 1 is in the heap, while 2 is made of 0
    assert reading(1, 3).nbytes == 4 * KIB


def test_equals_are_placed_as_the_walk_from_the_results_comes_to_them() -> None:
    reads = [[], [], [0], [2], [1], [1, 3], [1, 4]]
    sizes = [KIB, 2 * KIB, KIB, KIB, KIB, 8, 8]
    assert pack(problem(reads, sizes, outputs=[5, 6])).nbytes == 4 * KIB
    assert pack(problem(reads, sizes, outputs=[6, 5])).nbytes == 5 * KIB


def test_what_is_updated_in_place_is_placed_by_the_time_until_its_update() -> None:
    """The fourth kernel's result comes first: by the time of the whole place it would lie on top, 8 KiB in all."""
    reads = [[], [0], [], [1], [], [3, 4]]
    sizes = [3 * KIB, 3 * KIB, KIB, 3 * KIB, 2 * KIB, 2 * KIB]
    assert pack(problem(reads, sizes, alias_sets={1: 0})).nbytes == 7 * KIB


def test_what_is_an_element_is_written_over_in_an_outputs_place_alone() -> None:
    def of(*outputs: int) -> int:
        buffers = [Buffer(f"pair{{{i}}}", KIB, Role.TEMPORARY, 0, i) for i in range(2)]
        buffers.append(Buffer("made", KIB, Role.OUTPUT if 2 in outputs else Role.TEMPORARY, 1, 2))
        buffers.append(Buffer("last", 8, Role.OUTPUT, 2, 3))
        kernel = Kernel("made", (0, 1), (2,), may_alias_elements={2: (0,)})
        kernels = (Kernel("pair", (), (0, 1)), kernel, Kernel("last", (2,), (3,)))
        return pack(Problem(tuple(buffers), kernels, outputs, frozenset())).nbytes

    assert of(2, 3) == KIB
    assert of(3) == 3 * KIB


def test_a_kernel_that_runs_again_makes_room_in_between() -> None:
    step = problem([[], [0], [1], [2], [3, 0]], [4 * KIB, 8, 6 * KIB, 8, 8])
    assert pack(step).nbytes >= 10 * KIB
    longer = pack(step, runs([0, 1, 2, 3, 0, 4]))
    assert 6 * KIB < longer.nbytes < 6 * KIB + 4 * GPU.alignment


def test_results_that_nobody_reads_are_written_all_the_same() -> None:
    """XLA takes nothing out of a scheduled fusion: a ResNet-50 whose plan ran one four times took 86 MiB more."""
    buffers = [Buffer(f"pair{{{i}}}", KIB, Role.TEMPORARY, 0, i) for i in range(2)]
    last = Buffer("last", 8, Role.OUTPUT, 1, 2)
    kernels = Kernel("pair", (), (0, 1)), Kernel("last", (1,), (2,))
    assert pack(Problem((*buffers, last), kernels, (2,), frozenset())).nbytes == 2 * KIB


AWAY = (
    "run 0",
    "offload 0",
    "run 1",
    "offloaded 0",
    "run 2",
    "prefetch 0",
    "run 3",
    "prefetched 0",
    "run 4",
)


def test_what_is_on_the_host_is_not_on_the_device() -> None:
    step = problem([[], [0], [1], [2], [3, 0]], [4 * KIB, 8, 6 * KIB, 8, 8])
    live = live_nbytes(step, actions(*AWAY)).tolist()
    prefetching = [6144 + 4096, 6144 + 8 + 4096, 8 + 4096, 8 + 4096 + 8]
    values = [4096, 4096, 4104, 4104, 8 + 6144, *prefetching]
    tokens = [0, 4, 4, 4, 0, 4, 4, 4, 0]  # a number beside each copy, from its begin to its end
    assert live == [nbytes + token for nbytes, token in zip(values, tokens, strict=True)]
    packing = pack(step, actions(*AWAY))
    assert packing.live_nbytes == 6144 + 8 + 4096 + 4 + 2 * GPU.alignment
    assert packing.host_nbytes == 4096
    late = (
        "run 0",
        "offload 0",
        "run 1",
        "offloaded 0",
        "run 2",
        "run 3",
        "prefetch 0",
        "prefetched 0",
        "run 4",
    )
    assert pack(step, actions(*late)).live_nbytes == 6144 + 8 + 2 * GPU.alignment


def test_the_host_has_a_heap_of_its_own() -> None:
    step = problem([[], [0], [1, 0], [2], [3, 2]], [4 * KIB, 8, 2 * KIB, 8, 8])
    first = ("run 0", "offload 0", "offloaded 0", "run 1", "prefetch 0", "prefetched 0", "run 2")
    later = ("offload 2", "offloaded 2", "run 3", "prefetch 2", "prefetched 2", "run 4")
    both = pack(step, actions(*first, *later))
    assert both.host_nbytes == 4 * KIB
    at_once = pack(step, actions(*first[:-2], *first[-1:], *later[:2], "prefetched 0", *later[2:]))
    assert at_once.host_nbytes == 6 * KIB


def test_every_table_of_a_tuple_stands_alone() -> None:
    buffers = [Buffer(f"pair{{{i}}}", KIB, Role.TEMPORARY, 0, i) for i in range(2)]
    buffers += [Buffer(f"last{i}", 8, Role.OUTPUT, i + 1, i + 2) for i in range(2)]
    kernels = (
        Kernel("pair", (), (0, 1)),
        Kernel("last0", (0, 1), (2,)),
        Kernel("last1", (0, 1), (3,)),
    )
    step = Problem(tuple(buffers), kernels, (2, 3), frozenset(), tables_nbytes=GPU.alignment)
    assert pack(step).nbytes == 2 * KIB + GPU.alignment
    twice = actions("run 0", "run 1", "run 0", "run 2")
    assert pack(step, twice).nbytes == 2 * KIB + 2 * GPU.alignment


def test_a_table_is_aligned_behind_the_last_buffer() -> None:
    buffers = [
        Buffer(f"pair{{{i}}}", nbytes, Role.TEMPORARY, 0, i) for i, nbytes in enumerate((KIB, 32))
    ]
    buffers.append(Buffer("last", 8, Role.OUTPUT, 1, 2))
    kernels = (Kernel("pair", (), (0, 1)), Kernel("last", (0, 1), (2,)))
    step = Problem(tuple(buffers), kernels, (2,), frozenset(), tables_nbytes=64, alignment=64)
    assert pack(step).nbytes == KIB + 64 + 64


def test_nothing_is_written_over_what_came_from_the_host() -> None:
    step = problem([[], [0], [0, 1]], [KIB, 8, KIB], over={2: (0,)})
    assert pack(step).live_nbytes == KIB + 8
    copied = actions("run 0, offload 0, offloaded 0, run 1, prefetch 0, prefetched 0, run 2")
    assert pack(step, copied).live_nbytes == 2 * KIB + 8 + 2 * GPU.alignment


def test_a_value_may_come_back_more_than_once() -> None:
    step = problem([[], [0], [1, 0], [2, 0]], [KIB, 8, 8, 8], outputs=[3])
    twice = actions(
        *("run 0", "offload 0", "run 1", "offloaded 0", "prefetch 0", "prefetched 0", "run 2"),
        *("prefetch 0", "prefetched 0", "run 3"),
    )
    assert pack(step, twice).host_nbytes == KIB


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    count = draw(st.integers(1, 14))
    reads = [
        draw(st.lists(st.integers(0, i - 1), max_size=3, unique=True)) if i else []
        for i in range(count)
    ]
    sizes = [GPU.alignment * draw(st.integers(1, 40)) for _ in range(count)]
    return problem(reads, sizes)


@given(problems())
def test_the_bytes_that_are_there_at_once(step: Problem) -> None:
    """Counted moment by moment; the layout takes at least these and at most all."""
    live = []
    for moment in range(len(step.kernels)):
        readers = (
            [k for k, kernel in enumerate(step.kernels) if i in kernel.reads]
            for i in range(len(step.buffers))
        )
        ends = [max([i, *numbers]) for i, numbers in enumerate(readers)]
        live.append(sum(b.nbytes for i, b in enumerate(step.buffers) if i <= moment <= ends[i]))
    packing = pack(step)
    assert packing.live_nbytes == max(live)
    assert packing.live_nbytes <= packing.nbytes <= sum(buffer.nbytes for buffer in step.buffers)


@given(problems(), st.integers(0, 13), st.integers(0, 13))
def test_a_run_again_takes_nothing_but_what_it_makes_and_keeps(
    step: Problem, number: int, time: int
) -> None:
    run, at = sorted((number % len(step.kernels), time % len(step.kernels)))
    sequence = [*range(at), run, *range(at, len(step.kernels))]
    kernel = step.kernels[run]
    touched_nbytes = sum(step.buffers[b].nbytes for b in (*kernel.writes, *kernel.reads))
    if run < at:
        assert pack(step, runs(sequence)).live_nbytes <= pack(step).live_nbytes + touched_nbytes


Span = tuple[int, int, int]  # first event, last event, bytes


def groups(*spans: Span, shared: Sequence[int] = ()) -> HeapGroups:
    """Each in a place of its own, but for some that have one together."""
    group_of = {number: min(shared) if number in shared else number for number in range(len(spans))}
    columns = ({number: span[at] for number, span in enumerate(spans)} for at in range(3))
    return HeapGroups.of(group_of, *columns)


def nbytes(heap_groups: HeapGroups, alignment: int = 1) -> int:
    return heap_nbytes(heap_groups, range(len(heap_groups.start)), alignment)


def test_what_is_there_at_different_times_lies_in_one_place() -> None:
    assert nbytes(groups((0, 1, 5), (2, 3, 7))) == 7
    assert nbytes(groups((0, 2, 5), (2, 3, 7))) == 12


def test_the_smallest_gap_that_holds_it_is_taken() -> None:
    # gaps of 8 and of 5 once two have ended
    stacked = [(0, 9, 10), (0, 3, 8), (0, 9, 7), (0, 3, 5), (0, 9, 4)]
    assert nbytes(groups(*stacked, (5, 9, 5), (6, 9, 8))) == 34
    assert nbytes(groups(*stacked, (5, 9, 3), (6, 9, 8), (7, 9, 2))) == 34


def test_places_are_aligned() -> None:
    assert nbytes(groups((0, 1, 5), (0, 1, 3)), alignment=4) == 8 + 3


def test_a_group_takes_its_largest_from_its_first_to_its_last() -> None:
    spans = (0, 1, 5), (2, 3, 8), (0, 3, 4)
    assert groups(*spans, shared=(0, 1)).members == {0: [0, 1], 2: [2]}
    sharing = groups(*spans, shared=(0, 1))
    assert sharing.live_nbytes() == nbytes(sharing) == 12


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 5), st.integers(1, 40)), min_size=1, max_size=12
    )
)
def test_no_less_than_is_live_and_no_more_than_all(drawn: list[Span]) -> None:
    events = sorted(
        range(2 * len(drawn)),
        key=lambda at: (drawn[at // 2][0] + at % 2 * drawn[at // 2][1], at % 2, at),
    )
    clock = {event: time for time, event in enumerate(events)}
    sizes = [size for *_, size in drawn]
    spans = ((clock[2 * n], clock[2 * n + 1], size) for n, size in enumerate(sizes))
    heap_groups = groups(*spans)
    assert heap_groups.live_nbytes() <= nbytes(heap_groups) <= sum(size for *_, size in drawn)
