"""Checks that a schedule computes what the step computes. Planners keep to these rules; tests check that they do.

A buffer overwritten in place is read later only by kernels that do so in the module's own order. Kernels that run once
keep their order, what is inside of a block runs right before it, and a copy is in the computation that makes what it
copies.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping

from memplan.planning.problem import Problem, Role
from memplan.planning.schedule import Action, Kind, Schedule


def fault(problem: Problem, schedule: Schedule) -> str | None:
    """The first fault of a schedule, or None."""
    counted = Counter(action.number for action in schedule if action.kind is Kind.RUN)
    for number, kernel in enumerate(problem.kernels):
        if must_run_once(problem, number) and counted[number] != 1 and (counted[number] or not kernel.recomputable):
            return f"{kernel.name} runs {counted[number]} times"
    effects = [a.number for a in schedule if a.kind is Kind.RUN and not problem.kernels[a.number].recomputable]
    if effects != sorted(effects):
        return "what runs once does not run in its order"
    return _body_fault(problem, schedule) or _Replay(problem).fault(schedule)


def must_run_once(problem: Problem, number: int) -> bool:
    """Must a kernel run exactly once? It must if it has an effect, or a result is an output or shares its place."""
    kernel = problem.kernels[number]
    return not kernel.recomputable or not all(has_own_place(problem, buffer) for buffer in kernel.writes)


def has_own_place(problem: Problem, buffer: int) -> bool:
    """Is a buffer alone in its place, and no output?"""
    return len(problem.places[problem.buffers[buffer].place]) == 1 and buffer not in problem.returned


def pair_ends(problem: Problem) -> Mapping[int, int]:
    """Start of an asynchronous pair -> the kernel that ends it; its results are incomplete before."""
    kernels = enumerate(problem.kernels)
    return {kernel.started_by: number for number, kernel in kernels if kernel.started_by is not None}


def _boundaries_passed(problem: Problem) -> list[int]:
    """By kernel: how many boundaries precede it in its block, in the module's order."""
    passed: Counter[int | None] = Counter()
    found = []
    for kernel in problem.kernels:
        found.append(passed[kernel.block])
        passed[kernel.block] += kernel.is_boundary
    return found


def _body_fault(problem: Problem, schedule: Schedule) -> str | None:
    """Bodies must be complete and right before their block, and no run and no copy may cross a boundary in its body."""
    kernels, ran = problem.kernels, [action.number for action in schedule if action.kind is Kind.RUN]
    where: dict[int, list[int]] = defaultdict(list)
    for time, number in enumerate(ran):
        for block in problem.blocks_around(number):
            where[block].append(time)
    for time, number in enumerate(ran):
        inside = where.get(number, [])
        if inside and inside != list(range(time - len(inside), time)):
            return f"what is inside of {kernels[number].name} is not right before it"
    plain = _boundaries_passed(problem)
    here, passed = None, Counter[int | None]()
    for action in schedule:
        if action.kind is Kind.RUN:
            here = kernels[action.number].block
            if here is not None and passed[here] != plain[action.number]:
                return f"{kernels[action.number].name} has left its computation"
            passed[here] += kernels[action.number].is_boundary
        elif (maker := problem.buffers[action.number].maker) is not None:
            home = kernels[maker].block
            if home != here or (home is not None and passed[home] != plain[maker]):
                return f"{problem.buffers[action.number].name} is copied outside of the computation that makes it"
    return None


class _Replay:
    """Replays a schedule and tracks which buffer each place holds."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._ends = pair_ends(problem)
        self._late: set[tuple[int, int]] = set()  # (kernel, buffer): reads after an overwrite in the module's own order
        self._begin()
        for number in range(len(problem.kernels)):
            self._late.update((number, read) for read in problem.kernels[number].reads if not self._holds(read))
            self._write(number)

    def _begin(self) -> None:
        self._made = {number for number, buffer in enumerate(self._problem.buffers) if buffer.maker is None}
        self._in_place = {self._problem.buffers[number].place: number for number in sorted(self._made, reverse=True)}
        self._on_host = set[int]()
        self._under_way: dict[int, Kind] = {}
        self._held = Counter[int]()  # what asynchronous pairs read that have not ended
        self._ran = set[int]()

    def _holds(self, buffer: int) -> bool:
        return buffer in self._made and self._in_place[self._problem.buffers[buffer].place] == buffer

    def _hold(self, number: int) -> None:
        """The start of a pair reads its operands until the end of it; what runs again ends at once."""
        kernels, start = self._problem.kernels, self._problem.kernels[number].started_by
        if number in self._ends and number not in self._ran:
            self._held.update(kernels[number].reads)
        elif start is not None:
            self._held.subtract(kernels[start].reads)

    def _write(self, number: int) -> None:
        self._hold(number)
        self._ran.add(number)
        for buffer in self._problem.kernels[number].writes:
            self._made.add(buffer)
            self._in_place[self._problem.buffers[buffer].place] = buffer

    def fault(self, schedule: Schedule) -> str | None:
        self._begin()
        for action in schedule:
            if action.kind is not Kind.RUN:
                if found := self._copy(action):
                    return found
                continue
            kernel = self._problem.kernels[action.number]
            if action.number in self._ran and self._ends.get(action.number, action.number) not in self._ran:
                return f"{kernel.name} runs again before its end"
            if any(self._held[written] for written in kernel.writes):
                return f"{kernel.name} runs again while an asynchronous pair reads what it made"
            for read in kernel.reads:
                if read not in self._made or not (self._holds(read) or (action.number, read) in self._late):
                    return f"{kernel.name} reads {self._problem.buffers[read].name}, which is not there"
            self._write(action.number)
        if self._under_way:
            return "a copy never ends"
        gone = [self._problem.buffers[output].name for output in self._problem.outputs if not self._holds(output)]
        return f"{gone[0]} is not there at the end" if gone else None

    def _copy(self, action: Action) -> str | None:
        number, kind = action.number, action.kind
        buffer, before = self._problem.buffers[number], self._under_way.pop(number, None)
        begins = kind in (Kind.OFFLOAD, Kind.PREFETCH)
        expected = {Kind.OFFLOADED: Kind.OFFLOAD, Kind.PREFETCHED: Kind.PREFETCH}.get(kind)
        maker = buffer.maker
        whole = number in self._made and (maker is None or self._ends.get(maker, maker) in self._ran)
        there = {Kind.OFFLOAD: whole, Kind.PREFETCH: number in self._on_host}.get(kind, True)
        own = buffer.role is Role.TEMPORARY and has_own_place(self._problem, number)
        if not own or before != expected or not there or (kind is Kind.PREFETCH and self._held[number]):
            return f"{kind.value} of {buffer.name} is out of turn"
        if begins:
            self._under_way[number] = kind
        elif kind is Kind.OFFLOADED:
            self._on_host.add(number)
        return None
