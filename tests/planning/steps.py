"""Steps as problems, drawn at random: training, updates in place, loops."""

from dataclasses import dataclass, field, replace
from random import Random

from memplan.planning.problem import Buffer, Kernel, Problem, Role

MIB = 2**20


@dataclass
class Builder:
    """Builds a problem; methods return numbers of buffers."""

    buffers: list[Buffer] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    outputs: set[int] = field(default_factory=set)
    donated: set[int] = field(default_factory=set)

    def argument(self, nbytes: int = MIB, donated: bool = False) -> int:
        number = len(self.buffers)
        self.buffers.append(Buffer(f"argument{number}", nbytes, Role.ARGUMENT, None, number))
        if donated:
            self.donated.add(number)
        return number

    def kernel(
        self,
        reads: tuple[int, ...],
        nbytes: tuple[int, ...] | int,
        seconds: float = 1.0,
        aliases: int | None = None,
        output: bool = False,
        block: int | None = None,
        recomputable: bool = True,
        over: bool = False,
        started_by: int | None = None,
    ) -> tuple[int, ...]:
        sizes = (nbytes,) if isinstance(nbytes, int) else nbytes
        written = tuple(range(len(self.buffers), len(self.buffers) + len(sizes)))
        role = Role.OUTPUT if output else Role.TEMPORARY
        for number, size in zip(written, sizes, strict=True):
            alias_set = number if aliases is None else self.buffers[aliases].alias_set
            self.buffers.append(Buffer(f"buffer{number}", size, role, len(self.kernels), alias_set))
        sources = {}
        if over and written:
            alike = (read for read in reads if self.buffers[read].nbytes == sizes[0])
            sources[written[0]] = tuple(alike)
        name = f"kernel{len(self.kernels)}"
        kernel = Kernel(name, reads, written, sources, {}, seconds, block, recomputable)
        self.kernels.append(replace(kernel, started_by=started_by))
        self.outputs.update(written if output else ())
        return written

    def end(self, started: int) -> None:
        """The end of the asynchronous pair whose start makes this."""
        self.kernel((started,), (), 0.0, recomputable=False, started_by=self.buffers[started].maker)

    def problem(self) -> Problem:
        return Problem(
            tuple(self.buffers), tuple(self.kernels), tuple(self.outputs), frozenset(self.donated)
        )


def training(layers: int, seed: int, sharing: bool = True) -> Problem:
    """A chain forward and back again; each layer's argument is updated once its gradient is there.

    Args:
      sharing: arguments are donated, operands written over.
    """
    random = Random(seed)
    b = Builder()
    weights = [b.argument(MIB, donated=sharing) for _ in range(layers)]

    def size() -> int:
        return random.randint(1, 8) * MIB

    def took() -> float:
        return random.uniform(1, 3)

    (value,) = b.kernel((weights[0],), size(), took())
    values = [value]
    for weight in weights[1:]:
        scratch = (size(),) if random.random() < 0.3 else ()
        value, *_ = b.kernel((weight, value), (size(), *scratch), took())
        values.append(value)
        if random.random() < 0.5:
            (value,) = b.kernel((value,), b.buffers[value].nbytes, took(), over=sharing)
    (gradient,) = b.kernel((value,), MIB, took())
    for layer in reversed(range(layers)):
        (own,) = b.kernel((values[layer], gradient), MIB, took())
        b.kernel((weights[layer], own), MIB, took(), aliases=weights[layer], output=True)
        if layer:
            reads, nbytes, seconds = (values[layer], gradient), size(), took()
            over = sharing and random.random() < 0.5
            (gradient,) = b.kernel(reads, nbytes, seconds, over=over)
    return b.problem()


def fetching(layers: int, seed: int) -> Problem:
    """A chain forward and back again; each layer's weight comes by an asynchronous pair around the layer before."""
    random = Random(seed)
    b = Builder()

    def fetched() -> int:
        return b.kernel((b.argument(8),), random.randint(1, 8) * MIB, 0.0, recomputable=False)[0]

    weights = [fetched()]
    values = []
    (value,) = b.kernel((), MIB)
    for layer in range(layers):
        b.end(weights[layer])
        weights.append(fetched())
        nbytes = random.randint(1, 8) * MIB
        (value,) = b.kernel((weights[layer], value), nbytes, random.uniform(1, 3))
        values.append(value)
    b.end(weights[layers])
    for layer in reversed(range(layers)):
        (value,) = b.kernel((weights[layer], values[layer], value), MIB, random.uniform(1, 3))
    b.kernel((value, weights[layers]), 8, output=True)
    return b.problem()


def accumulating(layers: int, trips: int, seed: int) -> Problem:
    """A loop whose body is a chain forward and back again, which adds to a sum; then the sum is read."""
    b = Builder()
    weight = b.argument(MIB)
    (before,) = b.kernel((weight,), 2 * MIB)
    (zero,) = b.kernel((), MIB)
    step = training(layers, seed)
    loop = len(b.kernels) + 1 + len(step.kernels) + 2
    (state,) = b.kernel((), MIB, block=loop, recomputable=False, aliases=zero)
    b.kernels[-1] = replace(b.kernels[-1], is_boundary=True)
    shift = len(b.buffers)
    inner = len(b.kernels)
    for number, buffer in enumerate(step.buffers):
        role = Role.ARGUMENT if buffer.maker is None else Role.TEMPORARY
        maker = None if buffer.maker is None else buffer.maker + inner
        b.buffers.append(replace(buffer, role=role, maker=maker, alias_set=shift + number))
    for kernel in step.kernels:
        reads = (
            *(read + shift for read in kernel.reads),
            *((before,) if not kernel.reads[1:] else ()),
        )
        writes = tuple(written + shift for written in kernel.writes)
        b.kernels.append(replace(kernel, reads=reads, writes=writes, may_alias={}, block=loop))
    updates = tuple(output + shift for output in sorted(step.outputs))
    b.kernel((state, *updates), MIB, block=loop, recomputable=False, aliases=zero)
    b.kernel((len(b.buffers) - 1,), (), block=loop, recomputable=False)
    b.kernels[-1] = replace(b.kernels[-1], is_boundary=True)
    (after,) = b.kernel((zero, before), MIB, 0.0, recomputable=False, aliases=zero)
    b.kernels[-1] = replace(b.kernels[-1], trips=trips)
    b.kernel((after, before), 8, output=True)
    return b.problem()


def in_a_loop(problem: Problem, trips: int) -> Problem:
    """The same kernels as the body of a loop; every kernel has the next number."""
    last = len(problem.kernels) + 2

    def later(number: int | None) -> int | None:
        return None if number is None else number + 1

    body = [
        replace(kernel, block=later(kernel.block) or last, started_by=later(kernel.started_by))
        for kernel in problem.kernels
    ]
    begin = Kernel("body:begin", (), (), block=last, recomputable=False, is_boundary=True)
    end = Kernel("body:end", problem.outputs, (), block=last, recomputable=False, is_boundary=True)
    loop = Kernel("loop", (), (), recomputable=False, trips=trips)
    buffers = [replace(buffer, maker=later(buffer.maker)) for buffer in problem.buffers]
    return replace(problem, buffers=tuple(buffers), kernels=(begin, *body, end, loop))
