"""Small problems and schedules, written down."""

from collections.abc import Mapping, Sequence

from memplan.planning.problem import Buffer, Kernel, Problem, Role
from memplan.planning.schedule import Action, Kind, Schedule


def actions(*texts: str) -> Schedule:
    """`run 0, offload 0` as actions."""
    words = (word.split() for word in ", ".join(texts).split(", "))
    return tuple(Action(Kind(kind), int(number)) for kind, number in words)


def problem(
    reads: Sequence[Sequence[int]],
    nbytes: Sequence[int],
    outputs: Sequence[int] = (),
    alias_sets: Mapping[int, int] | None = None,
    over: Mapping[int, tuple[int, ...]] | None = None,
    arguments: Sequence[int] = (),
    donated: Sequence[int] = (),
) -> Problem:
    """Arguments first, then kernel `i` makes the next buffer and reads `reads[i]`."""
    first = len(arguments)
    buffers = [
        Buffer(f"argument{i}", size, Role.ARGUMENT, None, i) for i, size in enumerate(arguments)
    ]
    for i, size in enumerate(nbytes):
        number = first + i
        role = Role.OUTPUT if number in outputs else Role.TEMPORARY
        buffers.append(Buffer(f"kernel{i}", size, role, i, (alias_sets or {}).get(number, number)))
    kernels = [
        Kernel(
            f"kernel{i}", tuple(read), (first + i,), {first + i: (over or {}).get(first + i, ())}
        )
        for i, read in enumerate(reads)
    ]
    return Problem(tuple(buffers), tuple(kernels), tuple(outputs), frozenset(donated))


def updating() -> Problem:
    """A weight, what is computed from it, what from that, and the weight's update in place."""
    buffers = (
        Buffer("weight", 8, Role.ARGUMENT, None, 0),
        Buffer("first", 8, Role.TEMPORARY, 0, 1),
        Buffer("second", 8, Role.TEMPORARY, 1, 2),
        Buffer("updated", 8, Role.OUTPUT, 2, 0),
        Buffer("loss", 8, Role.OUTPUT, 3, 4),
    )
    kernels = (
        Kernel("first", (0,), (1,)),
        Kernel("second", (1,), (2,)),
        Kernel("updated", (0, 2), (3,)),
        Kernel("loss", (1, 2), (4,)),
    )
    return Problem(buffers, kernels, (3, 4), frozenset({0}))


def looping() -> Problem:
    """A value, a loop with two kernels, and a reader of the value and of the loop's result."""
    buffers = (
        Buffer("before", 8, Role.TEMPORARY, 0, 0),
        Buffer("state", 8, Role.TEMPORARY, 1, 1),
        Buffer("inner", 8, Role.TEMPORARY, 2, 2),
        Buffer("next", 8, Role.TEMPORARY, 3, 1),
        Buffer("result", 8, Role.TEMPORARY, 5, 1),
        Buffer("after", 8, Role.OUTPUT, 6, 5),
    )
    kernels = (
        Kernel("before", (), (0,)),
        Kernel("body:begin", (), (1,), block=5, recomputable=False, is_boundary=True),
        Kernel("inner", (1,), (2,), block=5),
        Kernel("next", (1, 2), (3,), block=5),
        Kernel("body:end", (3,), (), block=5, recomputable=False, is_boundary=True),
        Kernel("loop", (0,), (4,), recomputable=False, trips=3),
        Kernel("after", (0, 4), (5,)),
    )
    return Problem(buffers, kernels, (5,), frozenset())


def calling() -> Problem:
    """A call with two kernels, both of whose results are read behind it, as XLA:CPU draws random bits."""
    buffers = (
        Buffer("state", 8, Role.TEMPORARY, 0, 0),
        Buffer("bits", 8, Role.TEMPORARY, 1, 1),
        Buffer("beside", 8, Role.TEMPORARY, 3, 2),
        Buffer("after", 8, Role.OUTPUT, 4, 3),
    )
    kernels = (
        Kernel("state", (), (0,), block=2, recomputable=False),
        Kernel("bits", (0,), (1,), block=2, recomputable=False),
        Kernel("call", (), (), recomputable=False),
        Kernel("beside", (0,), (2,)),
        Kernel("after", (1, 2), (3,)),
    )
    return Problem(buffers, kernels, (3,), frozenset())


def fetching() -> Problem:
    """A value that comes by an asynchronous pair, a kernel beside it, and a reader of both."""
    buffers = (
        Buffer("fetched", 8, Role.TEMPORARY, 0, 0),
        Buffer("beside", 8, Role.TEMPORARY, 1, 1),
        Buffer("loss", 8, Role.OUTPUT, 3, 2),
    )
    kernels = (
        Kernel("copy-start", (), (0,), recomputable=False),
        Kernel("beside", (), (1,)),
        Kernel("copy-done", (0,), (), recomputable=False, started_by=0),
        Kernel("loss", (0, 1), (2,)),
    )
    return Problem(buffers, kernels, (2,), frozenset())
