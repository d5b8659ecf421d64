"""Steps compiled through the hook, and sequences that run some of their kernels again."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import optax

from memplan.hardware import catalog
from memplan.planning.packing import Packing, needed, pack
from memplan.planning.problem import Problem, Role
from memplan.planning.schedule import Action, Kind, Schedule, runs
from memplan.planning.search.planner import plan
from memplan.verify.same_module import judge
from memplan.xla import hook
from memplan.xla.buffers import problem_of
from memplan.xla.module import read_module
from memplan.xla.target import Target, described_mesh
from memplan.xla.write import write

Step = Callable[..., Any]


def dense(width: int, layers: int) -> tuple[Step, tuple[Any, ...]]:
    """Training of equal layers with momentum; (params, momentum), batch."""
    optimizer = optax.sgd(0.1, momentum=0.9)

    def step(state: Any, x: jax.Array) -> Any:
        def loss(weights: list[jax.Array]) -> jax.Array:
            y = x
            for weight in weights:
                y = jnp.tanh(y @ weight)
            return (y**2).mean()

        weights, momentum = state
        value, gradient = jax.value_and_grad(loss)(weights)
        updates, momentum = optimizer.update(gradient, momentum)
        return (optax.apply_updates(weights, updates), momentum), value

    weights = [
        jnp.cos(jnp.arange(width * width, dtype=jnp.float32) + i).reshape(width, width) / 8 for i in range(layers)
    ]
    return step, (
        (weights, optimizer.init(weights)),
        jnp.sin(jnp.arange(8.0 * width * width)).reshape(8 * width, width),
    )


def scanned(width: int, layers: int) -> tuple[Step, tuple[Any, ...]]:
    """The same by a scan, with a table that is updated in place."""

    def step(state: Any, x: jax.Array) -> Any:
        def loss(weights: jax.Array) -> jax.Array:
            y, _ = jax.lax.scan(lambda y, weight: (jnp.tanh(y @ weight) + jnp.sin(y), None), x, weights)
            return (y**2).mean()

        weights, table = state
        value, gradient = jax.value_and_grad(loss)(weights)
        return (weights - 0.1 * gradient, table.at[3].set(value)), value

    weights = jnp.cos(jnp.arange(layers * width * width, dtype=jnp.float32)).reshape(layers, width, width) / 8
    return step, ((weights, jnp.zeros(64)), jnp.sin(jnp.arange(8.0 * width * width)).reshape(8 * width, width))


def branching(width: int, layers: int) -> tuple[Step, tuple[Any, ...]]:
    """A condition before and after layers that may run again."""

    def step(state: Any, x: jax.Array) -> Any:
        weights, count = state

        def loss(weights: jax.Array) -> jax.Array:
            y = jax.lax.cond(count[0] % 2 == 0, lambda x: jnp.sin(x) @ weights[0], lambda x: x @ weights[1].T, x)
            for weight in weights:
                y = jnp.tanh(y @ weight)
            return jax.lax.cond(y[0, 0] > 0, lambda y: (y**2).mean(), lambda y: y.sum(), y)

        value, gradient = jax.value_and_grad(loss)(weights)
        return (weights - 0.1 * gradient, count + 1), value

    _, ((weights, _), x) = scanned(width, layers)
    return step, ((weights, jnp.zeros(1, jnp.int32)), x)


def accumulating(width: int, layers: int) -> tuple[Step, tuple[Any, ...]]:
    """Gradients summed over parts of the batch, each with a step of its own in a loop's body."""

    def step(state: Any, x: jax.Array) -> Any:
        def loss(weights: list[jax.Array], part: jax.Array) -> jax.Array:
            y = part
            for weight in weights:
                y = jnp.tanh(y @ weight)
            return (y**2).mean()

        def one(total: tuple[Any, jax.Array], part: jax.Array) -> tuple[Any, None]:
            value, gradient = jax.value_and_grad(loss)(weights, part)
            return (jax.tree.map(jnp.add, total[0], gradient), total[1] + value), None

        weights, seen = state
        nothing = jax.tree.map(jnp.zeros_like, weights)
        (gradient, value), _ = jax.lax.scan(one, (nothing, jnp.float32(0)), x.reshape(4, -1, width))
        return ([weight - 0.1 * change for weight, change in zip(weights, gradient, strict=True)], seen + 1), value

    _, ((weights, _), x) = dense(width, layers)
    return step, ((weights, jnp.zeros(1)), jnp.concatenate([x, x]))


def pooling(width: int, layers: int) -> tuple[Step, tuple[Any, ...]]:
    """Largest values of windows, whose gradients XLA makes by one operation with results that nobody reads."""

    def step(state: Any, x: jax.Array) -> Any:
        def loss(weights: list[jax.Array]) -> jax.Array:
            y = x.reshape(8, 16, -1, width)
            for weight in weights[:2]:
                y = jnp.tanh(y @ weight)
                y = jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
            return (y**2).mean()

        value, gradient = jax.value_and_grad(loss)(state)
        return [weight - 0.1 * change for weight, change in zip(state, gradient, strict=True)], value

    _, ((weights, _), x) = dense(width, layers)
    return step, (weights, x)


def updating(seed: int) -> tuple[Step, tuple[Any, ...]]:
    """Training of what gathers, scatters and updates slices, as the seed has it: places of many equal sizes."""
    random = Random(seed)
    width, layers = random.choice((64, 128)), random.randint(3, 6)
    ways, rows = random.choices(["product", "sum", "slice", "rows"], k=layers), random.choice((512, 1024))
    sources = [random.randint(0, layer) for layer in range(layers)]

    def layer(way: str, h: jax.Array, weight: jax.Array, index: jax.Array) -> jax.Array:
        product = h @ weight
        if way == "product":
            return jnp.tanh(product)
        if way == "sum":
            return h * jax.ops.segment_sum(jnp.sin(product[index]), index, rows)
        if way == "slice":
            return jax.lax.dynamic_update_slice(jnp.tanh(h), jnp.sin(product[:64]), (1, 0))
        return h.at[index].add(jnp.cos(product[index]))

    def step(weights: list[jax.Array], x: jax.Array, index: jax.Array) -> Any:
        def loss(weights: list[jax.Array]) -> jax.Array:
            made = [x]
            for way, source, weight in zip(ways, sources, weights, strict=True):
                made.append(layer(way, made[source], weight, index))
            return jnp.stack([(one**2).mean() for one in made]).sum()

        return jax.tree.map(lambda old, g: old - 0.1 * g, weights, jax.grad(loss)(weights))

    weights = [jax.ShapeDtypeStruct((width, width), jnp.float32)] * layers
    return step, (
        weights,
        jax.ShapeDtypeStruct((rows, width), jnp.float32),
        jax.ShapeDtypeStruct((rows,), jnp.int32),
    )


STEPS: Mapping[str, Callable[[int, int], tuple[Step, tuple[Any, ...]]]] = {
    "dense": dense,
    "scanned": scanned,
    "branching": branching,
    "accumulating": accumulating,
    "pooling": pooling,
}


_COUNT = itertools.count()


@dataclass
class Compiled:
    """What was compiled, what was predicted of it and of the plain order, and how many runs and copies were added.

    Attributes:
      text: what the compiler was handed.
    """

    compiled: Any
    plain: Packing
    packing: Packing
    repeated: int
    copies: int
    text: str


def randomly(seed: int) -> Callable[[Problem], Schedule]:
    """Kernels run again as the seed has it, none with 0."""
    return lambda problem: again(problem, Random(seed), 60 if seed else 0)


def copying(seed: int) -> Callable[[Problem], Schedule]:
    """Some buffers copied to the host and back as the seed has it."""
    return lambda problem: moved(problem, Random(seed), 6)


def within(share: float) -> Callable[[Problem], Schedule]:
    """What fits a share of the bytes that are there at once in the plain order."""

    def planned(problem: Problem) -> Schedule:
        return plan(problem, int(share * pack(problem).nbytes)).schedule

    return planned


def compiled(
    step: Step, args: Sequence[Any], name: str, plan: Callable[[Problem], Schedule], device: str | None = None
) -> Compiled:
    """A step with a plan, judged; for a described GPU or the CPU that is here."""
    told: dict[str, Any] = {}

    def rewrite(text: str) -> str:
        module = read_module(text)
        problem = problem_of(module, on_gpu=device is not None)
        schedule = plan(problem)
        told.update(plain=pack(problem))
        told.update(packing=pack(problem, schedule))
        kinds = [action.kind for action in schedule]
        told.update(repeated=kinds.count(Kind.RUN) - len(problem.kernels))
        told.update(copies=kinds.count(Kind.OFFLOAD) + kinds.count(Kind.PREFETCH))
        planned = write(module, problem, schedule)
        judge(module, read_module(planned))
        told.update(text=planned)
        return planned

    def unique(*args: Any) -> Any:
        return step(*args)

    unique.__name__ = f"memplan_test_{name}_{next(_COUNT)}"
    if device is not None:
        target = Target(catalog.DEVICES[device], described=True)
        described_mesh(target.device)
        with hook.asking(f"jit_{unique.__name__}", rewrite, "cuda") as asked:
            done = target.compile(unique, args, {}, {"donate_argnums": 0}).compiled
    else:
        with hook.asking(f"jit_{unique.__name__}", rewrite, "cpu") as asked:
            done = jax.jit(unique, donate_argnums=0).lower(*args).compile()
    asked.check()
    assert asked.called
    return Compiled(done, **told)


def again(problem: Problem, random: Random, tries: int) -> Schedule:
    """The module's order, with kernels run again right before one of their later readers, where that is right."""
    repeated: dict[int, set[int]] = defaultdict(set)
    for _ in range(tries):
        number = random.randrange(len(problem.kernels))
        kernel = problem.kernels[number]
        if not kernel.repeatable or not all(alone(problem, buffer) for buffer in kernel.writes):
            continue
        readers = [n for n in beside(problem, number) if n > number + 1 and reads(problem, n) & set(kernel.writes)]
        if readers and still_there(problem, number, reader := random.choice(readers)):
            repeated[first_of(problem, reader)].add(number)
    return needed(problem, runs(run for n in range(len(problem.kernels)) for run in (*sorted(repeated[n]), n)))


def moved(problem: Problem, random: Random, count: int) -> Schedule:
    """The module's order, with so many buffers copied to the host, and back before every read after a while."""
    before: dict[int, list[Action]] = defaultdict(list)
    for buffer in random.sample(range(len(problem.buffers)), len(problem.buffers)):
        copies = list(copied(problem, buffer)) if movable(problem, buffer) and count else []
        count -= bool(copies)
        for number, kind in copies:
            before[first_of(problem, number)].append(Action(kind, buffer))
    actions = (action for n in range(len(problem.kernels)) for action in (*before[n], Action(Kind.RUN, n)))
    return needed(problem, tuple(actions))


def copied(problem: Problem, buffer: int, gap: int = 5) -> Iterator[tuple[int, Kind]]:
    """(the kernel that it comes before, what is done) of copies round the gaps between reads."""
    maker = problem.buffers[buffer].maker
    assert maker is not None
    numbers = beside(problem, maker)
    read = [at for at, n in enumerate(numbers) if n == maker or (n > maker and buffer in reads(problem, n))]
    gaps = [(one, other) for one, other in itertools.pairwise(read) if other - one >= gap]
    if gaps:
        yield numbers[numbers.index(maker) + 1], Kind.OFFLOAD
        yield numbers[gaps[0][0] + 2], Kind.OFFLOADED
    for _, end in gaps:
        yield numbers[end - 2], Kind.PREFETCH
        yield numbers[end], Kind.PREFETCHED


def movable(problem: Problem, buffer: int) -> bool:
    one = problem.buffers[buffer]
    if one.role is not Role.TEMPORARY or not one.nbytes or one.maker is None or not alone(problem, buffer):
        return False
    return not problem.kernels[one.maker].fixed


def alone(problem: Problem, buffer: int) -> bool:
    """It shares its place with no other, and is no output."""
    return len(problem.places[problem.buffers[buffer].place]) == 1 and buffer not in problem.outputs


def beside(problem: Problem, number: int) -> list[int]:
    """Kernels of the same computation."""
    within = problem.kernels[number].within
    return [n for n, kernel in enumerate(problem.kernels) if kernel.within == within]


def reads(problem: Problem, number: int) -> set[int]:
    """What a kernel reads, and what is read in it."""
    inside = (n for n in range(first_of(problem, number), number))
    return {buffer for n in (*inside, number) for buffer in problem.kernels[n].reads}


def first_of(problem: Problem, number: int) -> int:
    """The first kernel of a loop, which stands behind what is in it."""
    return next(n for n in range(number + 1) if number in (n, *problem.around(n)))


def still_there(problem: Problem, number: int, time: int) -> bool:
    """Has nothing been written over what a kernel reads, until then?"""
    for read in problem.kernels[number].reads:
        since = problem.buffers[read].maker
        for other, buffer in enumerate(problem.buffers):
            taken = buffer.place == problem.buffers[read].place and other != read and buffer.maker is not None
            if taken and (-1 if since is None else since) <= (buffer.maker or 0) < time:
                return False
    return True
