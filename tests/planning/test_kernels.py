"""Kernels as stages: the same bytes as the layout counts, and no run where what it reads has been written over."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from memplan.planning.evict import evict
from memplan.planning.kernels import staged
from memplan.planning.legal import fault
from memplan.planning.packing import live_nbytes, pack
from memplan.planning.problem import Buffer, Kernel, Problem, Role
from memplan.planning.schedule import runs
from memplan.planning.stages import replay

MIB = 2**20


def training(layers: int, seed: int) -> Problem:
    """A chain forward and back again; each layer's argument is updated once its gradient is there."""
    random = Random(seed)
    buffers = [Buffer(f"weight{i}", MIB, Role.ARGUMENT, None, i) for i in range(layers)]
    kernels: list[Kernel] = []

    def add(name: str, reads: tuple[int, ...], nbytes: int, place: int | None = None) -> int:
        number = len(buffers)
        role = Role.TEMPORARY if place is None else Role.OUTPUT
        buffers.append(Buffer(name, nbytes, role, len(kernels), number if place is None else place))
        kernels.append(Kernel(name, reads, (number,), seconds=random.uniform(1, 3), repeatable=place is None))
        return number

    made = [add("forward0", (0,), random.randint(1, 8) * MIB)]
    for layer in range(1, layers):
        made.append(add(f"forward{layer}", (layer, made[-1]), random.randint(1, 8) * MIB))
    gradient, outputs = add("loss", (made[-1],), MIB), []
    for layer in reversed(range(layers)):
        own = add(f"weights{layer}", (made[layer], gradient), MIB)
        outputs.append(add(f"update{layer}", (layer, own), MIB, place=layer))
        if layer:
            gradient = add(f"backward{layer}", (made[layer], gradient), random.randint(1, 8) * MIB)
    return Problem(tuple(buffers), tuple(kernels), frozenset(outputs), frozenset(range(layers)))


@given(st.integers(2, 12), st.integers(0, 99))
def test_stages_count_what_is_there(layers: int, seed: int) -> None:
    problem = training(layers, seed)
    found = staged(problem, 0)
    assert found.schedule(()) == runs(range(len(problem.kernels)))
    assert replay(found.stages, ()).step_nbytes == tuple(live_nbytes(problem).tolist())


@given(st.integers(3, 12), st.integers(0, 99), st.sampled_from([0.9, 0.75, 0.6]))
def test_nothing_reads_what_has_been_written_over(layers: int, seed: int, share: float) -> None:
    problem = training(layers, seed)
    found = staged(problem, int(share * pack(problem).live_nbytes))
    schedule = found.schedule(evict(found.stages, seconds=2))
    assert fault(problem, schedule) is None
    sequence = [action.number for action in schedule]
    assert [run for at, run in enumerate(sequence) if run not in sequence[:at]] == list(range(len(problem.kernels)))
    assert live_nbytes(problem, schedule).max() <= live_nbytes(problem).max()
