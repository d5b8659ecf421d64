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


def buffers(text: str) -> tuple[Buffer, ...]:
    """`name maker alias-set`, of 8 bytes each, some with their role."""
    rows = (row.split() for row in text.split(", "))
    return tuple(
        Buffer(name, 8, Role(*role or ["temporary"]), int(maker), int(alias_set))
        for name, maker, alias_set, *role in rows
    )


def updating() -> Problem:
    """A weight, what is computed from it, what from that, and the weight's update in place."""
    results = "first 0 1, second 1 2, updated 2 0 output, loss 3 4 output"
    kernels = (
        Kernel("first", (0,), (1,)),
        Kernel("second", (1,), (2,)),
        Kernel("updated", (0, 2), (3,)),
        Kernel("loss", (1, 2), (4,)),
    )
    weight = Buffer("weight", 8, Role.ARGUMENT, None, 0)
    return Problem((weight, *buffers(results)), kernels, (3, 4), frozenset({0}))


def branching() -> Problem:
    """Two branches that compute from one weight and update it in place, each before its end."""
    weight = Buffer("weight", 8, Role.ARGUMENT, None, 0)
    results = "first 0 1, second 1 2, update 2 0, other 4 4, next 5 5, replaced 6 0"
    ends = {"recomputable": False}
    kernels = (
        Kernel("first", (0,), (1,), block=3),
        Kernel("second", (1,), (2,), block=3),
        Kernel("update", (0, 2), (3,), block=3),
        Kernel("0:end", (3,), (), **ends),
        Kernel("other", (0,), (4,), block=7),
        Kernel("next", (4,), (5,), block=7),
        Kernel("replaced", (0, 4, 5), (6,), block=7),
        Kernel("1:end", (6,), (), **ends),
    )
    return Problem((weight, *buffers(results)), kernels, (), frozenset({0}))


def looping() -> Problem:
    """A value, a loop with two kernels, and a reader of the value and of the loop's result."""
    results = "before 0 0, state 1 1, inner 2 2, next 3 1, result 5 1, after 6 5 output"
    kernels = (
        Kernel("before", (), (0,)),
        Kernel("body:begin", (), (1,), block=5, recomputable=False, is_boundary=True),
        Kernel("inner", (1,), (2,), block=5),
        Kernel("next", (1, 2), (3,), block=5),
        Kernel("body:end", (3,), (), block=5, recomputable=False, is_boundary=True),
        Kernel("loop", (0,), (4,), recomputable=False, trips=3),
        Kernel("after", (0, 4), (5,)),
    )
    return Problem(buffers(results), kernels, (5,), frozenset())


def calling() -> Problem:
    """A call with two kernels, both of whose results are read behind it, as XLA:CPU draws random bits."""
    results = "state 0 0, bits 1 1, beside 3 2, after 4 3 output"
    kernels = (
        Kernel("state", (), (0,), block=2, recomputable=False),
        Kernel("bits", (0,), (1,), block=2, recomputable=False),
        Kernel("call", (), (), recomputable=False),
        Kernel("beside", (0,), (2,)),
        Kernel("after", (1, 2), (3,)),
    )
    return Problem(buffers(results), kernels, (3,), frozenset())


def fetching() -> Problem:
    """A value that comes by an asynchronous pair, a kernel beside it, and a reader of both."""
    results = "fetched 0 0, beside 1 1, loss 3 2 output"
    kernels = (
        Kernel("copy-start", (), (0,), recomputable=False),
        Kernel("beside", (), (1,)),
        Kernel("copy-done", (0,), (), recomputable=False, started_by=0),
        Kernel("loss", (0, 1), (2,)),
    )
    return Problem(buffers(results), kernels, (2,), frozenset())
