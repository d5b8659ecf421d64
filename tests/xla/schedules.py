"""Schedules that recompute and copy as a seed has it, and steps compiled with them through the hook."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import jax

from memplan.hardware import catalog
from memplan.hardware.backend import CPU, GPU
from memplan.planning.liveness import eliminate_dead
from memplan.planning.packing import Packing, pack
from memplan.planning.problem import Problem, Role
from memplan.planning.schedule import Action, Kind, Schedule, runs
from memplan.planning.search.planner import plan
from memplan.program.lowerable import Lowerable
from memplan.verify.same_module import judge
from memplan.xla import hook
from memplan.xla.buffers import problem_of
from memplan.xla.gpu.platform import described_devices
from memplan.xla.module import Module
from memplan.xla.target import Target
from memplan.xla.write import write
from tests.xla.steps import Step

_COUNT = itertools.count()


@dataclass
class Compiled:
    """What was compiled, what was predicted of it and of the plain order, and how many runs and copies were added.

    Attributes:
      module: what the compiler was handed.
    """

    compiled: Any
    plain: Packing
    packing: Packing
    recomputed: int
    copies: int
    module: Module


def random_recompute(seed: int) -> Callable[[Problem], Schedule]:
    """Kernels run again as the seed has it, none with 0."""
    return lambda problem: with_recompute(problem, Random(seed), 60 if seed else 0)


def random_copies(seed: int) -> Callable[[Problem], Schedule]:
    """Some buffers copied to the host and back as the seed has it."""
    return lambda problem: with_copies(problem, Random(seed), 6)


def within_share(share: float) -> Callable[[Problem], Schedule]:
    """What fits a share of the bytes that are there at once in the plain order."""

    def planned(problem: Problem) -> Schedule:
        return plan(problem, int(share * pack(problem).nbytes)).schedule

    return planned


def compile_step(
    step: Step,
    args: Sequence[Any],
    name: str,
    plan: Callable[[Problem], Schedule],
    device: str | None = None,
) -> Compiled:
    """A step with a plan, judged; for a described GPU or the CPU that is here."""
    figures: dict[str, Any] = {}

    def rewrite(module: Module) -> Module:
        problem = problem_of(module, backend=GPU if device else CPU)
        schedule = plan(problem)
        figures.update(plain=pack(problem))
        figures.update(packing=pack(problem, schedule))
        kinds = [action.kind for action in schedule]
        figures.update(recomputed=kinds.count(Kind.RUN) - len(problem.kernels))
        figures.update(copies=kinds.count(Kind.OFFLOAD) + kinds.count(Kind.PREFETCH))
        planned = write(module, problem, schedule)
        judge(module, planned)
        figures.update(module=planned)
        return planned

    def unique(*args: Any) -> Any:
        return step(*args)

    unique.__name__ = f"memplan_test_{name}_{next(_COUNT)}"
    if device is not None:
        target = Target(catalog.DEVICES[device], described=True)
        described_devices(target.device)
        with hook.intercept(f"jit_{unique.__name__}", rewrite, "cuda") as interception:
            done = target.compile(Lowerable(unique, args, {}, {"donate_argnums": 0})).compiled
    else:
        with hook.intercept(f"jit_{unique.__name__}", rewrite, "cpu") as interception:
            done = jax.jit(unique, donate_argnums=0).lower(*args).compile()
    interception.check()
    assert interception.called
    return Compiled(done, **figures)


def with_recompute(problem: Problem, random: Random, tries: int) -> Schedule:
    """The module's order, with kernels run again right before one of their later readers, where that is right."""
    recomputed: dict[int, set[int]] = defaultdict(set)
    for _ in range(tries):
        number = random.randrange(len(problem.kernels))
        kernel = problem.kernels[number]
        if not kernel.recomputable or not all(alone(problem, buffer) for buffer in kernel.writes):
            continue
        readers = [
            n
            for n in beside(problem, number)
            if n > number + 1 and reads(problem, n) & set(kernel.writes)
        ]
        if readers and still_there(problem, number, reader := random.choice(readers)):
            recomputed[first_of(problem, reader)].add(number)
    return eliminate_dead(
        problem,
        runs(run for n in range(len(problem.kernels)) for run in (*sorted(recomputed[n]), n)),
    )


def with_copies(problem: Problem, random: Random, count: int) -> Schedule:
    """The module's order, with so many buffers copied to the host, and back before every read after a while."""
    before: dict[int, list[Action]] = defaultdict(list)
    for buffer in random.sample(range(len(problem.buffers)), len(problem.buffers)):
        copies = list(copies_of(problem, buffer)) if movable(problem, buffer) and count else []
        count -= bool(copies)
        for number, kind in copies:
            before[first_of(problem, number)].append(Action(kind, buffer))
    actions = (
        action for n in range(len(problem.kernels)) for action in (*before[n], Action(Kind.RUN, n))
    )
    return eliminate_dead(problem, tuple(actions))


def copies_of(problem: Problem, buffer: int, gap: int = 5) -> Iterator[tuple[int, Kind]]:
    """(the kernel that it comes before, what is done) of copies round the gaps between reads."""
    maker = problem.buffers[buffer].maker
    assert maker is not None
    numbers = beside(problem, maker)
    read = [
        at
        for at, n in enumerate(numbers)
        if n == maker or (n > maker and buffer in reads(problem, n))
    ]
    gaps = [(start, end) for start, end in itertools.pairwise(read) if end - start >= gap]
    if gaps:
        yield numbers[numbers.index(maker) + 1], Kind.OFFLOAD
        yield numbers[gaps[0][0] + 2], Kind.OFFLOADED
    for _, end in gaps:
        yield numbers[end - 2], Kind.PREFETCH
        yield numbers[end], Kind.PREFETCHED


def movable(problem: Problem, buffer: int) -> bool:
    candidate = problem.buffers[buffer]
    return (
        candidate.role is Role.TEMPORARY
        and candidate.nbytes > 0
        and candidate.maker is not None
        and alone(problem, buffer)
    )


def alone(problem: Problem, buffer: int) -> bool:
    """It shares its place with no other, and is no output."""
    return (
        len(problem.alias_sets[problem.buffers[buffer].alias_set]) == 1
        and buffer not in problem.outputs
    )


def beside(problem: Problem, number: int) -> list[int]:
    """Kernels of the same computation."""
    within = problem.kernels[number].block
    return [n for n, kernel in enumerate(problem.kernels) if kernel.block == within]


def reads(problem: Problem, number: int) -> set[int]:
    """What a kernel reads, and what is read in it."""
    inside = (n for n in range(first_of(problem, number), number))
    return {buffer for n in (*inside, number) for buffer in problem.kernels[n].reads}


def first_of(problem: Problem, number: int) -> int:
    """The first kernel of a loop, which stands behind what is in it."""
    return next(n for n in range(number + 1) if number in (n, *problem.blocks_around(n)))


def still_there(problem: Problem, number: int, time: int) -> bool:
    """Has nothing been written over what a kernel reads, until then?"""
    for read in problem.kernels[number].reads:
        since = problem.buffers[read].maker
        for index, buffer in enumerate(problem.buffers):
            shares_place = (
                buffer.alias_set == problem.buffers[read].alias_set
                and index != read
                and buffer.maker is not None
            )
            if shares_place and (-1 if since is None else since) <= (buffer.maker or 0) < time:
                return False
    return True
