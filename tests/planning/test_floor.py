"""No plan takes less than the floor."""

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
    step = training(layers, seed)
    random = Random(seed)
    nbytes, kernel = floor(step)
    assert 0 <= kernel < len(step.kernels)
    for order in (range(len(step.kernels)), reorder(step)):
        sequence = [number for n in order for number in ([n] if n or not again else [n, 0])]
        # what the largest kernel reads is made again right before it
        if again and random.random() < 0.5:
            at = sequence.index(kernel)
            makers = {step.buffers[read].maker for read in step.kernels[kernel].reads}
            sequence[at:at] = sorted(
                maker for maker in makers if maker is not None and step.kernels[maker].recomputable
            )
        assert pack(step, eliminate_dead(step, runs(sequence))).nbytes >= nbytes


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
    step = accumulating(4, 3, 0)
    (loop,) = {kernel.block for kernel in step.kernels} - {None}
    inside = [number for number in range(len(step.kernels)) if step.kernels[number].block == loop]
    assert floor(step)[1] in inside
    outer = Buffer("outer", 64 * MIB, Role.TEMPORARY, len(step.kernels), len(step.buffers))
    kernels = list(step.kernels)
    first = kernels[inside[1]]
    reads = (*first.reads, len(step.buffers))
    kernels[inside[1]] = Kernel(first.name, reads, first.writes, block=loop)
    kernels.append(Kernel("outer", (), (len(step.buffers),)))
    longer = Problem((*step.buffers, outer), tuple(kernels), step.outputs, step.donated)
    assert floor(longer)[0] >= floor(step)[0] + 64 * MIB
