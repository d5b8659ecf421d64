"""Which temporaries XLA:TPU keeps in its cores, so that the device does not hold them."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from memplan.planning.packing import pack
from memplan.planning.problem import Kernel, Problem
from tests.planning.small import buffers, problem


def live_nbytes(steps: Problem, vector_memory_bytes: int) -> int:
    """Of the device, if the cores have so many bytes."""
    return pack(replace(steps, vector_memory_bytes=vector_memory_bytes)).live_nbytes


def test_the_device_does_not_hold_what_fits_in_the_cores() -> None:
    chain = problem([[], [0], [1], [2]], [8, 16, 8, 8])
    assert live_nbytes(chain, 0) == 24
    assert live_nbytes(chain, 8) == 16  # the second value is too large
    assert live_nbytes(chain, 16) == 8  # that gains most, and no other fits beside it
    assert live_nbytes(chain, 24) == 0


def test_of_equal_values_the_cores_keep_the_one_with_more_readers() -> None:
    steps = problem([[], [], [0, 1], [1, 2]], [8, 8, 8, 8])
    assert live_nbytes(steps, 0) == 24
    assert live_nbytes(steps, 8) == 16  # with the first value there instead, 24
    assert live_nbytes(steps, 24) == 0


def test_a_value_whose_accesses_are_far_apart_stays_on_the_device() -> None:
    def steps(nbytes: int) -> Problem:
        return problem([[], [], [0], [2], [3], [1, 4]], [8, 8, nbytes, nbytes, nbytes, 8])

    assert live_nbytes(steps(100), 0) == 208
    assert live_nbytes(steps(100), 16) == 208  # 508 bytes move between the two accesses to 1
    assert live_nbytes(steps(8), 0) == 24
    assert live_nbytes(steps(8), 16) == 8  # and here 48


def test_inside_of_a_loop_a_value_may_wait() -> None:
    results = "state 0 0, waiting 1 1, large 2 2, next 3 0, result 5 0"
    large = [
        replace(buffer, nbytes=4096) if buffer.name == "large" else buffer
        for buffer in buffers(results)
    ]
    kernels = (
        Kernel("body:begin", (), (0,), block=5, recomputable=False, is_boundary=True),
        Kernel("waiting", (0,), (1,), block=5),
        Kernel("large", (0,), (2,), block=5),
        Kernel("next", (0, 1, 2), (3,), block=5),
        Kernel("body:end", (3,), (), block=5, recomputable=False, is_boundary=True),
        Kernel("loop", (), (4,), recomputable=False, trips=3),
    )
    steps = Problem(tuple(large), kernels, (), frozenset())
    assert live_nbytes(steps, 0) - live_nbytes(steps, 8) == 8


def test_an_argument_takes_room_there_while_a_kernel_reads_it() -> None:
    steps = problem([[0], [1]], [8, 8], arguments=[24])
    assert live_nbytes(steps, 31) == 8
    assert live_nbytes(steps, 32) == 0
    assert live_nbytes(steps, 16) == 0  # an argument that does not fit is not copied there


@given(st.lists(st.integers(1, 64), min_size=2, max_size=8), st.integers(0, 256))
def test_room_in_the_cores_never_costs_bytes_of_the_device(sizes: list[int], room: int) -> None:
    chain = problem([[], *([number] for number in range(len(sizes) - 1))], sizes)
    assert live_nbytes(chain, room) <= live_nbytes(chain, 0)
    if room >= 2 * max(sizes):
        assert live_nbytes(chain, room) == 0
