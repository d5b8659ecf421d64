"""What no plan goes below."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from memplan.planning.floor import floor
from memplan.planning.liveness import eliminate_dead
from memplan.planning.packing import pack
from memplan.planning.problem import Buffer, Kernel, Problem, Role
from memplan.planning.schedule import runs
from memplan.planning.search.reorder import reorder
from tests.planning.steps import MIB, Builder, accumulating, training


@given(st.integers(1, 10), st.integers(0, 999), st.booleans())
def test_no_order_goes_below(layers: int, seed: int, again: bool) -> None:
    one, random = training(layers, seed), Random(seed)
    nbytes, kernel = floor(one)
    assert 0 <= kernel < len(one.kernels)
    for order in (range(len(one.kernels)), reorder(one)):
        sequence = [number for n in order for number in ([n] if n or not again else [n, 0])]
        if again and random.random() < 0.5:  # what the largest kernel reads is made again right before it
            at = sequence.index(kernel)
            makers = {one.buffers[read].maker for read in one.kernels[kernel].reads}
            sequence[at:at] = sorted(maker for maker in makers if maker is not None and one.kernels[maker].recomputable)
        assert pack(one, eliminate_dead(one, runs(sequence))).nbytes >= nbytes


def test_it_is_what_one_kernel_reads_and_writes() -> None:
    b = Builder()
    (first,) = b.kernel((), 3 * MIB)
    (second,) = b.kernel((first,), 2 * MIB)
    b.kernel((first, second), 4 * MIB)
    assert floor(b.problem()) == (9 * MIB, 2)


def test_what_may_lie_in_an_output_or_over_an_operand_does_not_count() -> None:
    b = Builder()
    (first,) = b.kernel((), 3 * MIB)
    (second,) = b.kernel((first,), 3 * MIB, over=True)
    b.kernel((second,), 2 * MIB)
    b.kernel((), 4 * MIB, output=True)
    assert floor(b.problem()) == (2 * MIB, 2)


def test_a_loop_holds_what_its_body_reads() -> None:
    one = accumulating(4, 3, 0)
    (loop,) = {kernel.block for kernel in one.kernels} - {None}
    inside = [number for number in range(len(one.kernels)) if one.kernels[number].block == loop]
    assert floor(one)[1] in inside
    outer = Buffer("outer", 64 * MIB, Role.TEMPORARY, len(one.kernels), len(one.buffers))
    kernels = list(one.kernels)
    first = kernels[inside[1]]
    kernels[inside[1]] = Kernel(first.name, (*first.reads, len(one.buffers)), first.writes, block=loop)
    kernels.append(Kernel("outer", (), (len(one.buffers),)))
    more = Problem((*one.buffers, outer), tuple(kernels), one.outputs, one.donated)
    assert floor(more)[0] >= floor(one)[0] + 64 * MIB
