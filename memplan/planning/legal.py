"""Checks that a schedule computes what the step computes.

Planners keep these rules; tests check them.

A buffer that is overwritten in place may be read later only by kernels that do so in the module's
own order. Kernels that run once keep their order. A body immediately precedes its block. A copy is
in the computation that makes the copied value.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping

from memplan.planning.problem import Problem, Role
from memplan.planning.schedule import Action, Kind, Schedule


def fault(problem: Problem, schedule: Schedule) -> str | None:
    """The first fault of a schedule, or None."""
    counts = Counter(action.number for action in schedule if action.kind is Kind.RUN)
    for number, kernel in enumerate(problem.kernels):
        count = counts[number]
        if must_run_once(problem, number) and count != 1 and (count or not kernel.recomputable):
            return f"{kernel.name} runs {count} times"
    runs = (action.number for action in schedule if action.kind is Kind.RUN)
    effects = [number for number in runs if not problem.kernels[number].recomputable]
    if effects != sorted(effects):
        return "a kernel that runs once does not run in its order"
    return _body_fault(problem, schedule) or _Replay(problem).fault(schedule)


def must_run_once(problem: Problem, number: int) -> bool:
    """Must a kernel run exactly once?

    It must if it has an effect, or if a result is an output or aliases another buffer.
    """
    kernel = problem.kernels[number]
    is_aliased = not all(is_unaliased(problem, buffer) for buffer in kernel.writes)
    return not kernel.recomputable or is_aliased


def is_unaliased(problem: Problem, buffer: int) -> bool:
    """Is a buffer alone in its alias set, and no output?"""
    members = problem.alias_sets[problem.buffers[buffer].alias_set]
    return len(members) == 1 and buffer not in problem.returned


def pair_ends(problem: Problem) -> Mapping[int, int]:
    """Start of an asynchronous pair -> its end, before which its results are incomplete."""
    ends = dict[int, int]()
    for number, kernel in enumerate(problem.kernels):
        if kernel.started_by is not None:
            ends[kernel.started_by] = number
    return ends


def _boundaries_before(problem: Problem) -> list[int]:
    """By kernel: how many boundaries precede it in its block, in the module's order."""
    boundaries: Counter[int | None] = Counter()
    counts = []
    for kernel in problem.kernels:
        counts.append(boundaries[kernel.block])
        boundaries[kernel.block] += kernel.is_boundary
    return counts


def _body_fault(problem: Problem, schedule: Schedule) -> str | None:
    """The first fault about bodies, or None.

    A body must be complete and right before its block, and neither a run nor a copy may cross a
    boundary of its body.
    """
    kernels = problem.kernels
    order = [action.number for action in schedule if action.kind is Kind.RUN]
    times_inside: dict[int, list[int]] = defaultdict(list)
    for time, number in enumerate(order):
        for block in problem.blocks_around(number):
            times_inside[block].append(time)
    for time, number in enumerate(order):
        inside = times_inside.get(number, [])
        if inside and inside != list(range(time - len(inside), time)):
            return f"the body of {kernels[number].name} is not right before it"
    boundaries_before = _boundaries_before(problem)
    current = None  # block
    boundaries = Counter[int | None]()
    for action in schedule:
        if action.kind is Kind.RUN:
            current = kernels[action.number].block
            if current is not None and boundaries[current] != boundaries_before[action.number]:
                return f"{kernels[action.number].name} has left its computation"
            boundaries[current] += kernels[action.number].is_boundary
        elif (maker := problem.buffers[action.number].maker) is not None:
            block = kernels[maker].block
            is_crossed = block is not None and boundaries[block] != boundaries_before[maker]
            if block != current or is_crossed:
                name = problem.buffers[action.number].name
                return f"{name} is copied outside of the computation that makes it"
    return None


class _Replay:
    """Replays a schedule and tracks which buffer each alias set holds."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._ends = pair_ends(problem)
        # (kernel, buffer): reads after an overwrite in the module's own order
        self._late_reads: set[tuple[int, int]] = set()
        self._begin()
        for number, kernel in enumerate(problem.kernels):
            overwritten = (read for read in kernel.reads if not self._is_intact(read))
            self._late_reads.update((number, read) for read in overwritten)
            self._write(number)

    def _begin(self) -> None:
        buffers = self._problem.buffers
        self._written = {number for number, buffer in enumerate(buffers) if buffer.maker is None}
        # alias set -> the buffer that was written last
        numbers = sorted(self._written, reverse=True)
        self._latest = {buffers[number].alias_set: number for number in numbers}
        self._on_host = set[int]()
        self._copies: dict[int, Kind] = {}  # buffer -> the start of its copy
        self._pair_reads = Counter[int]()  # operands of asynchronous pairs that have not ended
        self._ran = set[int]()

    def _is_intact(self, buffer: int) -> bool:
        """Is a buffer written, and not overwritten since?"""
        alias_set = self._problem.buffers[buffer].alias_set
        return buffer in self._written and self._latest[alias_set] == buffer

    def _count_pair_reads(self, number: int) -> None:
        """The start of a pair reads its operands until the end; a recomputed pair ends at once."""
        kernels = self._problem.kernels
        start = kernels[number].started_by
        if number in self._ends and number not in self._ran:
            self._pair_reads.update(kernels[number].reads)
        elif start is not None:
            self._pair_reads.subtract(kernels[start].reads)

    def _write(self, number: int) -> None:
        self._count_pair_reads(number)
        self._ran.add(number)
        for buffer in self._problem.kernels[number].writes:
            self._written.add(buffer)
            self._latest[self._problem.buffers[buffer].alias_set] = buffer

    def fault(self, schedule: Schedule) -> str | None:
        buffers = self._problem.buffers
        self._begin()
        for action in schedule:
            if action.kind is not Kind.RUN:
                if copy_fault := self._copy_fault(action):
                    return copy_fault
                continue
            number = action.number
            kernel = self._problem.kernels[number]
            if number in self._ran and self._ends.get(number, number) not in self._ran:
                return f"{kernel.name} runs again before its end"
            if any(self._pair_reads[written] for written in kernel.writes):
                return f"{kernel.name} runs again while an asynchronous pair reads what it made"
            for read in kernel.reads:
                is_readable = self._is_intact(read) or (number, read) in self._late_reads
                if read not in self._written or not is_readable:
                    return f"{kernel.name} reads {buffers[read].name}, which is not there"
            self._write(number)
        if self._copies:
            return "a copy never ends"
        for output in self._problem.outputs:
            if not self._is_intact(output):
                return f"{buffers[output].name} is not there at the end"
        return None

    def _copy_fault(self, action: Action) -> str | None:
        number = action.number
        kind = action.kind
        buffer = self._problem.buffers[number]
        start = self._copies.pop(number, None)
        expected = {Kind.OFFLOADED: Kind.OFFLOAD, Kind.PREFETCHED: Kind.PREFETCH}.get(kind)
        maker = buffer.maker
        is_complete = maker is None or self._ends.get(maker, maker) in self._ran
        has_source = {
            Kind.OFFLOAD: number in self._written and is_complete,
            Kind.PREFETCH: number in self._on_host,
        }.get(kind, True)
        may_copy = buffer.role is Role.TEMPORARY and is_unaliased(self._problem, number)
        is_read_by_pair = kind is Kind.PREFETCH and self._pair_reads[number]
        if not may_copy or start != expected or not has_source or is_read_by_pair:
            return f"{kind.value} of {buffer.name} is out of turn"
        if kind in (Kind.OFFLOAD, Kind.PREFETCH):
            self._copies[number] = kind
        elif kind is Kind.OFFLOADED:
            self._on_host.add(number)
        return None
