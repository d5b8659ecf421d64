"""Which programs are compiled, in which order, and when it stops: against a compiler that says what it would take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest

from memplan.compilation.attempts import Attempts
from memplan.compilation.deadline import CTRL_C, TIME_LIMIT, Deadline
from memplan.compilation.limits import Headroom
from memplan.compilation.outcome import Explored, Outcome
from memplan.planning.graph import Graph, Value
from memplan.planning.loops import Loop, Residuals
from memplan.planning.plan import Plan
from memplan.planning.transforms import IndexedStacks, LoopResiduals, StateOnHost
from memplan.program.slabs.choose import SlabCandidate
from memplan.program.trace import Applied, Program, WithResiduals, WithStateOnHost
from tests.compilation.outcomes import PROGRAM, in_slabs, outcome


@pytest.fixture(autouse=True)
def exact_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memplan.compilation.outcome._PREDICTION_SLACK", 0)


MORE_THAN_ANY = 1 << 60  # bytes; who keeps so many fewer keeps the fewest
COPYING = PROGRAM.transformed(WithStateOnHost(StateOnHost((0,)), frozenset()), None)


@dataclass
class Fake:
    """Says, one program after another, what it would take: device bytes, or an outcome."""

    takes: list[int | Outcome]
    calls: list[tuple[Program, bool, Headroom]] = field(default_factory=list)
    compiled: list[Program] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)  # bytes that loops were asked to keep fewer

    def explore(
        self,
        program: Program,
        hides_latency: bool,
        headroom: Headroom,
        commits: Callable[[Explored], bool],
    ) -> Explored:
        """What is compiled after it was explored takes what it did."""
        call = program, hides_latency, headroom
        if not any(program is known and rest == [*call[1:]] for known, *rest in self.calls):
            self.calls.append(call)
        number = next(
            n
            for n, (known, *rest) in enumerate(self.calls)
            if known is program and rest == [*call[1:]]
        )
        answer = self.takes[number]
        whole = outcome(program, answer) if isinstance(answer, int) else answer
        whole = replace(whole, hides_latency=hides_latency)
        explored = Explored(program, whole.target, whole.limits, whole.planned, hides_latency)
        if not commits(explored):
            return explored
        self.compiled.append(program)
        return whole


@dataclass(frozen=True)
class FakeChoice:
    """Other residuals: a program, and the estimate."""

    program: Program
    nbytes: int
    seconds: float
    has_segments: bool = False
    stacked_s: float = 0.0

    @property
    def most_seconds(self) -> float:
        return self.seconds + self.stacked_s


class FakeResiduals:
    """The step itself stacks nothing."""

    def nbytes(self, program: Program) -> int:
        return 0


@dataclass
class FakeCandidates:
    """The other programs of a step, in order."""

    program: Program
    by_index: Program | None
    choices: list[Program | None]  # with fewer residuals; None: there is no other
    slabs: tuple[SlabCandidate, ...]
    expected_s: float  # of all slabs, relative to the step
    splits: bool = True
    missing: list[int] = field(default_factory=list)  # bytes that loops were asked to keep fewer
    residuals: FakeResiduals = field(default_factory=FakeResiduals)
    gain_s: float = 0.0  # that each choice promises after the one before it
    fewest: FakeChoice | None = None
    made: dict[tuple[int, bool, bool], FakeChoice | None] = field(default_factory=dict)
    smaller: Program | None = None  # by algorithms with less workspace
    # estimate of a byte -> slabs that are chosen once it is known
    corrected: dict[float, SlabCandidate] = field(default_factory=dict)
    in_smallest_slabs: tuple[Program, ...] = ()

    def indexed_stacks(self, program: Program) -> Program | None:
        assert program is self.program
        return self.by_index

    def less_workspace(self, program: Program) -> Program | None:
        return self.smaller

    def fewer_residuals(
        self, program: Program, excess: int, may_use_host: bool, may_segment: bool = True
    ) -> FakeChoice | None:
        """A choice stacks as many bytes fewer as it was asked to; the same if asked again."""
        assert program in (self.program, self.by_index)
        if excess > MORE_THAN_ANY and not may_segment:
            return self.fewest
        question = excess, may_use_host, may_segment
        if question not in self.made:
            self.missing.append(excess)
            choice = self.choices.pop(0) if self.choices else None
            seconds = -self.gain_s * len(self.missing)
            has_segments = choice is not None and any(
                residuals is not None and residuals.segments for _, residuals in choice.loops
            )
            self.made[question] = choice and FakeChoice(choice, -excess, seconds, has_segments)
        return self.made[question]

    def with_residuals(self, choice: FakeChoice) -> Program:
        return choice.program

    def in_slabs(self, slowdown: float, estimate: float | None = None) -> Iterator[SlabCandidate]:
        if estimate in self.corrected:
            return iter([self.corrected[estimate]])
        slabs = self.slabs if slowdown >= self.expected_s else ()
        if estimate is None:
            return iter(slabs)
        return iter(sorted(slabs, key=lambda each: max(0, each.expected_bytes - 100 * estimate)))


def candidate(program: Program, nbytes: int, seconds: float = 1.0) -> SlabCandidate:
    return SlabCandidate((cast(Any, id(program)),), nbytes, seconds, lambda: program)


def attempt(
    compiler: Fake,
    program: Program = PROGRAM,
    programs: tuple[Program | None, ...] = (),
    slabs: tuple[Program, ...] = (),
    expected_bytes: tuple[int, ...] = (),
    expected_s: float = 1.0,
    by_index: Program | None = None,
    gain_s: float = 0.0,
    fewest: FakeChoice | None = None,
    corrected: dict[float, SlabCandidate] | None = None,
    smaller: Program | None = None,
    smallest_slabs: tuple[Program, ...] = (),
    notify: Any = lambda *_: None,
    **options: Any,
) -> Outcome:
    nbytes = expected_bytes or (100,) * len(slabs)
    in_slabs = tuple(candidate(part, size) for part, size in zip(slabs, nbytes, strict=True))
    candidates = FakeCandidates(program, by_index, list(programs), in_slabs, expected_s)
    candidates.gain_s = gain_s
    candidates.fewest = fewest
    candidates.corrected = corrected or {}
    candidates.smaller = smaller
    candidates.in_smallest_slabs = smallest_slabs
    attempts = Attempts(compiler, cast(Any, candidates), notify, **options)
    result = attempts.commit(attempts.explore(program))
    assert len(compiler.calls) == len(compiler.takes), "stopped too early"
    compiler.missing = candidates.missing
    return result


@dataclass
class Interrupted(Fake):
    """Ctrl-C is pressed while it explores programs after the first few."""

    after: int = 1

    def explore(self, *args: Any, **named: Any) -> Explored:
        if len(self.calls) == self.after:
            self.after = 0
            raise KeyboardInterrupt
        return super().explore(*args, **named)


def test_an_interrupted_search_compiles_what_is_in_hand() -> None:
    compiler = Interrupted([outcome(PROGRAM, 90, seconds=2.0)])
    result = attempt(compiler, slabs=(in_slabs(),), keeps_fitting=True)
    assert result.program is PROGRAM and result.ended_by == CTRL_C
    assert compiler.compiled == [PROGRAM]


@pytest.mark.parametrize(("nbytes", "keeps_fitting"), [(130, True), (90, False)])
def test_with_nothing_in_hand_or_to_keep_an_interrupt_is_an_interrupt(
    nbytes: int, keeps_fitting: bool
) -> None:
    first = outcome(PROGRAM, nbytes, seconds=2.0, predicted_to_fit=nbytes <= 100)
    compiler = Interrupted([first])
    with pytest.raises(KeyboardInterrupt):
        attempt(compiler, slabs=(in_slabs(),), keeps_fitting=keeps_fitting)
    assert not compiler.compiled


def test_a_second_interrupt_stops() -> None:
    """The second comes as the line is shown that says what is compiled."""
    told = list[str]()

    def notify(stage: str, share: float | None) -> None:
        told.append(stage)
        if "in slabs" in stage or stage.startswith("compiling the best"):
            raise KeyboardInterrupt

    compiler = Fake([outcome(PROGRAM, 90, seconds=2.0)])
    with pytest.raises(KeyboardInterrupt):
        attempt(compiler, slabs=(in_slabs(),), keeps_fitting=True, notify=notify)
    assert not compiler.compiled
    assert told == [
        "exploring the step",
        "choosing slabs: in hand 2.00 s in 90 B, at best 1.00 s",
        "exploring in slabs: in hand 2.00 s in 90 B, at best 1.00 s",
        "interrupted (again to stop), with a program in hand",
        "compiling the best: 2.00 s in 90 B",
    ]


@dataclass
class Clock:
    """A clock that stands still unless it is set."""

    now_s: float = 0.0

    def monotonic(self) -> float:
        return self.now_s


@dataclass
class Slow(Fake):
    """Every program takes ten seconds."""

    clock: Clock = field(default_factory=Clock)

    def explore(self, *args: Any, **named: Any) -> Explored:
        self.clock.now_s += 10
        return super().explore(*args, **named)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("memplan.compilation.deadline.time", clock)
    return clock


def test_a_time_limit_compiles_what_is_in_hand(clock: Clock) -> None:
    compiler = Slow([outcome(PROGRAM, 90, seconds=2.0)], clock=clock)
    result = attempt(compiler, slabs=(in_slabs(),), deadline=Deadline(5, 0))
    assert result.program is PROGRAM and result.ended_by == TIME_LIMIT
    assert compiler.compiled == [PROGRAM]


def test_a_time_limit_ends_with_the_smallest_if_nothing_fits(clock: Clock) -> None:
    compiler = Slow(misses((PROGRAM, 130)), clock=clock)
    result = attempt(compiler, slabs=(in_slabs(),), deadline=Deadline(5, 0))
    assert not result.fits and result.ended_by == TIME_LIMIT


def test_a_complete_search_was_not_ended(clock: Clock) -> None:
    compiler = Slow([90], clock=clock)
    assert attempt(compiler, deadline=Deadline(5, 0)).ended_by == ""


def test_a_choice_out_of_time_inside_the_compiler_keeps_the_program(clock: Clock) -> None:
    """The slabs that fit would be compiled at once, if no larger ones were to be chosen."""
    slabs = in_slabs()
    compiler = Slow([*misses((PROGRAM, 130)), outcome(slabs, 50)], clock=clock)
    result = attempt(compiler, slabs=(slabs,), deadline=Deadline(15, 0))
    assert result.program is slabs and result.ended_by == TIME_LIMIT


def test_without_a_limit_no_clock_ends_a_search(clock: Clock) -> None:
    clock.now_s = 1e12
    assert not Deadline(None, 0).has_passed


def test_it_says_that_nothing_fits_yet() -> None:
    told = list[str]()
    compiler = Fake(misses((PROGRAM, 130), (in_slabs(), 110)))
    attempt(compiler, slabs=(in_slabs(),), notify=lambda stage, share: told.append(stage))
    assert told[2] == "exploring in slabs: nothing fits yet, the smallest takes 130 B of 100 B"


def test_a_study_compiles_nothing_until_it_is_asked() -> None:
    compiler = Fake([90])
    attempts = Attempts(cast(Any, compiler), cast(Any, None), lambda *_: None, compiles=False)
    best = attempts.explore(PROGRAM)
    assert best.fits and not compiler.compiled
    assert attempts.commit(best).fits and compiler.compiled == [PROGRAM]


def test_any_that_fits_may_be_slow() -> None:
    slow = outcome(PROGRAM, 90, seconds=9.0)
    assert attempt(Fake([slow]), slabs=(in_slabs(),), any_that_fits=True).program is PROGRAM
    fewer = with_residuals(0), with_residuals(1)
    compiler = Fake([*misses((PROGRAM, 130)), outcome(fewer[0], 60, seconds=9.0)])
    assert attempt(compiler, programs=fewer, any_that_fits=True).program is fewer[0]


def count(result: Outcome) -> int:
    """How many programs it took, with those of another schedule or headroom."""
    return len(result.rejected) + 1


def test_what_fits_is_compiled_once() -> None:
    result = attempt(Fake([100]))
    assert (result.device_bytes, count(result)) == (100, 1)


def test_a_missed_prediction_reserves_what_it_missed_by() -> None:
    compiler = Fake([107, 103, 99])
    result = attempt(compiler)
    assert count(result) == 3
    assert result.smallest_unmodified is not None and result.smallest_unmodified.device_bytes == 99
    assert [headroom for *_, headroom in compiler.calls] == [Headroom(), Headroom(7), Headroom(10)]


def test_it_stops_after_so_many_tries() -> None:
    assert attempt(Fake([107, 103, 101])).device_bytes == 101
    assert attempt(Fake([107]), tries=1).device_bytes == 107


def test_host_bytes_are_reserved_too() -> None:
    compiler = Fake([outcome(PROGRAM, 90, 60), outcome(PROGRAM, 90, 50)])
    assert attempt(compiler).fits
    assert compiler.calls[1][2] == Headroom(0, 10)


def test_what_was_predicted_not_to_fit_is_not_tried_again() -> None:
    result = attempt(Fake([outcome(PROGRAM, 120, predicted_to_fit=False)]))
    assert not result.fits and count(result) == 1


def followed(hides_latency: bool | None) -> Plan:
    return Plan((), "f00d", "kernels", hides_latency=hides_latency)


def test_a_plan_that_is_followed_is_compiled_once() -> None:
    assert attempt(Fake([120]), programs=(COPYING,), follow=followed(None)).device_bytes == 120


@pytest.mark.parametrize("hides_latency", [True, False])
def test_a_plan_is_followed_on_the_schedule_that_it_was_made_for(hides_latency: bool) -> None:
    compiler = Fake([120])
    attempt(compiler, COPYING, follow=followed(hides_latency))
    assert [hides for _, hides, _ in compiler.calls] == [hides_latency]


def test_a_plan_that_does_not_say_its_schedule_is_tried_on_both() -> None:
    compiler = Fake([*misses((COPYING, 120)), 90])
    attempt(compiler, COPYING, follow=followed(None))
    assert [hides for _, hides, _ in compiler.calls] == [True, False]


def test_a_program_that_copies_is_tried_with_overlap_first() -> None:
    miss = outcome(COPYING, 120, predicted_to_fit=False)
    compiler = Fake([miss, 90])
    assert count(attempt(compiler, COPYING)) == 2
    assert [hides for _, hides, _ in compiler.calls] == [True, False]


def test_where_copies_do_not_overlap_there_is_one_schedule() -> None:
    miss = outcome(COPYING, 120, predicted_to_fit=False)
    assert not attempt(Fake([miss]), COPYING, copies_overlap=False).fits


def with_residuals(*kept: int) -> Program:
    body = Graph((Value("carry", 8),), ())
    loop = Loop(body, 4, 1, frozenset(), frozenset())
    return PROGRAM.transformed(WithResiduals(LoopResiduals((Residuals(kept),)), (loop,)), None)


@pytest.mark.parametrize(("seconds", "chosen"), [(0.9, 1), (1.2, 0)])
def test_segments_are_compared_with_loops_in_one_piece(seconds: float, chosen: int) -> None:
    body = Graph((Value("carry", 8),), ())
    loop = Loop(body, 4, 1, frozenset(), frozenset())
    segments = LoopResiduals((Residuals((), segments=2, segment_trips=1),))
    programs = PROGRAM.transformed(WithResiduals(segments, (loop,)), None), with_residuals(0)
    compiler = Fake([*misses((PROGRAM, 130)), 90, outcome(programs[1], 98, seconds=seconds)])
    result = attempt(compiler, programs=(programs[0], None, programs[1]))
    assert result.program is programs[chosen] and count(result) == 3
    # its plain module takes 500 bytes, 530 more than estimated; a twentieth of the limit is doubt
    assert compiler.missing == [30, 15, 530 - 100 - 5]


def test_loops_keep_fewer_residuals_by_what_was_missed_until_one_fits() -> None:
    programs = tuple(with_residuals(number) for number in range(3))
    compiler = Fake([*misses((PROGRAM, 130), (programs[0], 120)), 90])
    result = attempt(compiler, programs=programs)
    assert [id(program) for program, *_ in compiler.calls] == [
        id(program) for program in (PROGRAM, *programs[:2])
    ]
    assert compiler.missing == [30, 50, 35]
    assert result.program is programs[1] and count(result) == 3


@pytest.mark.parametrize(("seconds", "chosen"), [(0.5, 1), (1.2, 0)])
def test_what_waits_for_the_host_is_compared_with_what_does_not_use_it(
    seconds: float, chosen: int
) -> None:
    programs = with_residuals(0), with_residuals(1)
    waiting = outcome(programs[0], 90, waits_s=0.06)
    compiler = Fake([*misses((PROGRAM, 130)), waiting, outcome(programs[1], 95, seconds=seconds)])
    choices = programs[0], None, programs[1]
    assert attempt(compiler, programs=choices).program is programs[chosen]
    assert compiler.missing == [30, 15, 30, 20]


def test_what_was_compiled_and_not_taken_is_told() -> None:
    programs = with_residuals(0), with_residuals(1)
    result = attempt(
        Fake([*misses((PROGRAM, 130)), outcome(programs[0], 60, seconds=2.0), 90]),
        programs=programs,
    )
    assert [
        (summary.device_bytes, summary.step_s, summary.fits) for summary in result.rejected
    ] == [
        (130, 1.0, False),
        (60, 2.0, True),
    ]
    assert [summary.method for summary in result.rejected] == ["plain", "residuals"]


@pytest.mark.parametrize(("seconds", "chosen"), [(0.5, 1), (1.2, 0)])
def test_where_much_is_left_loops_may_keep_more(seconds: float, chosen: int) -> None:
    programs = with_residuals(0), with_residuals(1)
    compiler = Fake(
        [
            *misses((PROGRAM, 130)),
            outcome(programs[0], 60),
            outcome(programs[1], 95, seconds=seconds),
        ]
    )
    assert attempt(compiler, programs=programs, gain_s=1.0).program is programs[chosen]
    assert compiler.missing == [30, -15, -25]


@pytest.mark.parametrize(("gain_s", "compilations"), [(0.03, 3), (0.01, 2)])
def test_loops_that_may_keep_more_are_compiled_where_they_promise_to_be_faster(
    gain_s: float, compilations: int
) -> None:
    takes = [*misses((PROGRAM, 130)), 60, 95][:compilations]
    programs = with_residuals(0), with_residuals(1)
    assert count(attempt(Fake(takes), programs=programs, gain_s=gain_s)) == compilations


def test_where_a_plan_of_kernels_makes_up_for_what_is_missing_slowly_loops_keep_fewer() -> None:
    programs = with_residuals(0), with_residuals(1)
    slow = outcome(programs[0], 100, seconds=6.0)
    compiler = Fake([*misses((PROGRAM, 130)), slow, outcome(programs[1], 98)])
    assert attempt(compiler, programs=programs).program is programs[1]
    assert compiler.missing == [30, 31, 24]


@pytest.mark.parametrize(("seconds", "chosen"), [(1.0, 1), (1.3, 0)])
def test_where_a_plan_of_kernels_takes_time_loops_keep_so_few_that_none_is_needed(
    seconds: float, chosen: int
) -> None:
    programs = with_residuals(0), with_residuals(1)
    planned = outcome(programs[0], 90, seconds=1.2, unplanned_s=1.0)
    compiler = Fake([*misses((PROGRAM, 130)), planned, outcome(programs[1], 60, seconds=seconds)])
    assert attempt(compiler, programs=programs).program is programs[chosen]
    assert compiler.missing[:2] == [30, 30 + 500 - 100]


@pytest.mark.parametrize(
    ("saved_s", "seconds", "chosen"), [(0.5, 0.9, 1), (0.5, 1.1, 0), (0.01, None, 0)]
)
def test_the_fewest_residuals_are_compared_where_their_stacks_may_take_as_long(
    saved_s: float, seconds: float | None, chosen: int
) -> None:
    programs = with_residuals(0), with_residuals(1)
    compared = [] if seconds is None else [outcome(programs[1], 40, seconds=seconds)]
    compiler = Fake([*misses((PROGRAM, 130)), 90, *compared])
    fewest = FakeChoice(programs[1], -100, seconds=0.1, stacked_s=-0.1 - saved_s)
    result = attempt(compiler, programs=programs[:1], fewest=fewest)
    assert result.program is programs[chosen] and count(result) == 2 + len(compared)
    assert compiler.compiled == [programs[chosen]]


def test_where_correcting_is_in_vain_the_fewest_residuals_are_the_last() -> None:
    """After so many tries, or where the same are chosen again."""
    for again in (False, True):
        programs = [with_residuals(number) for number in range(4)]
        tries = (
            [(programs[0], 120)]
            if again
            else [(programs[0], 120), (programs[1], 110), (programs[2], 102)]
        )
        compiler = Fake([*misses((PROGRAM, 130), *tries), 70])
        result = attempt(
            compiler, programs=(programs[0], programs[0], programs[3]) if again else tuple(programs)
        )
        assert result.fits and result.program is programs[3]
        assert (
            compiler.missing[:-1] == ([30, 50] if again else [30, 50, 60])
            and compiler.missing[-1] > 1 << 60
        )


def test_the_same_residuals_are_not_compiled_twice() -> None:
    programs = with_residuals(0), with_residuals(0), with_residuals(0)
    compiler = Fake(misses((PROGRAM, 130), (programs[0], 120)))
    assert not attempt(compiler, programs=programs).fits


def test_where_nothing_fits_the_smallest_is_told() -> None:
    programs = with_residuals(0), with_residuals(1)
    result = attempt(
        Fake(misses((PROGRAM, 130), (programs[0], 110), (programs[1], 120))), programs=programs
    )
    assert (result.device_bytes, count(result)) == (110, 3) and result.program is programs[0]


def misses(*sizes: tuple[Program, int]) -> list[int | Outcome]:
    """Outcomes as they were predicted, all too large."""
    return [outcome(program, nbytes, predicted_to_fit=False) for program, nbytes in sizes]


def test_slabs_come_after_loops_that_fewer_residuals_and_only_until_one_fits() -> None:
    fewer, slabs = with_residuals(), tuple(in_slabs() for _ in range(3))
    compiler = Fake([*misses((PROGRAM, 130), (fewer, 120), (slabs[0], 110)), 90])
    result = attempt(compiler, programs=(fewer,), slabs=slabs)
    assert [id(program) for program, *_ in compiler.calls] == [
        id(program) for program in (PROGRAM, fewer, *slabs[:2])
    ]
    assert result.fits and result.program is slabs[1] and count(result) == 4


def test_a_program_in_slabs_has_one_schedule_and_is_corrected() -> None:
    slabs = in_slabs(on_host=True)
    compiler = Fake([*misses((PROGRAM, 130)), 107, 99])
    assert attempt(compiler, slabs=(slabs,)).fits
    assert [hides for _, hides, _ in compiler.calls[1:]] == [True, True]
    assert compiler.calls[2][2] == Headroom(7)


def test_a_few_programs_in_slabs_are_compiled_and_the_nearest_is_kept_in_mind() -> None:
    slabs = tuple(in_slabs() for _ in range(5))
    compiler = Fake(misses((PROGRAM, 130), (slabs[0], 150), (slabs[1], 140), (slabs[2], 160)))
    result = attempt(compiler, slabs=slabs, expected_bytes=(95, 63, 45, 28, 28))
    assert result.program is PROGRAM and result.closest_slab_attempt is not None
    assert result.closest_slab_attempt.device_bytes == 140
    assert result.closest_slab_attempt.in_slabs == slabs[1].in_slabs


@pytest.mark.parametrize("nbytes", [105, 95])
def test_the_smallest_slabs_are_explored_last(nbytes: int) -> None:
    slabs, others = tuple(in_slabs() for _ in range(3)), (in_slabs(), in_slabs())
    missed = misses((PROGRAM, 130), *((program, 110) for program in slabs), (others[0], 120))
    compiler = Fake([*missed, outcome(others[1], nbytes, predicted_to_fit=nbytes == 95)])
    more = (in_slabs(),) if nbytes == 95 else ()
    result = attempt(compiler, slabs=slabs, smallest_slabs=(*others, *more))
    assert result.program is others[1] and result.fits == (nbytes == 95)


def test_the_smallest_slabs_are_not_explored_if_anything_fits_however_slow() -> None:
    slow = outcome(PROGRAM, 90, seconds=2.0)
    assert attempt(Fake([slow]), smallest_slabs=(in_slabs(),)).program is PROGRAM
    slabs = in_slabs()
    compiler = Fake([*misses((PROGRAM, 130)), outcome(slabs, 90, seconds=2.0)])
    assert attempt(compiler, slabs=(slabs,), smallest_slabs=(in_slabs(),)).program is slabs


def test_after_a_miss_slabs_are_asked_for_that_are_expected_to_take_so_much_less() -> None:
    slabs = tuple(in_slabs() for _ in range(4))
    compiler = Fake(misses((PROGRAM, 130), (slabs[0], 110), (slabs[2], 105), (slabs[3], 101)))
    result = attempt(compiler, slabs=slabs, expected_bytes=(95, 94, 85, 81))
    assert not result.fits and count(result) == 4


@pytest.mark.parametrize(
    ("nbytes", "kernels", "is_explored"),
    [(95, 1501, True), (96, 1501, False), (200, 1500, True)],
)
def test_after_slabs_of_many_kernels_none_are_explored_that_would_miss_by_more_than_a_tenth(
    nbytes: int, kernels: int, is_explored: bool
) -> None:
    slabs = in_slabs(), in_slabs()
    outcomes = [*misses((PROGRAM, 130))]
    outcomes += [outcome(slabs[0], 115, predicted_to_fit=False, kernels=kernels)]
    outcomes += misses((slabs[1], 110)) if is_explored else []
    assert not attempt(Fake(outcomes), slabs=slabs, expected_bytes=(100, nbytes)).fits


@pytest.mark.parametrize(("expected_s", "is_explored"), [(0.98, True), (0.99, False)])
@pytest.mark.parametrize(("nbytes", "leaves_bytes"), [(94, True), (95, False)])
def test_slabs_that_leave_bytes_are_compared_with_larger_ones_that_promise_to_be_faster(
    expected_s: float, is_explored: bool, nbytes: int, leaves_bytes: bool
) -> None:
    slabs, larger = in_slabs(), in_slabs()
    estimate = 80 / nbytes
    outcomes = [*misses((PROGRAM, 130)), outcome(slabs, nbytes, seconds=1.1)]
    if is_explored and leaves_bytes:
        outcomes.append(outcome(larger, 99, seconds=1.0))
    compiler = Fake(outcomes)
    corrected = {estimate: candidate(larger, 90, expected_s)}
    result = attempt(compiler, slabs=(slabs,), expected_bytes=(80,), corrected=corrected)
    best = larger if is_explored and leaves_bytes else slabs
    assert result.program is best and compiler.compiled == [best]


@pytest.mark.parametrize("larger", [(101, 1.0), (99, 1.2)])
def test_larger_slabs_that_do_not_fit_or_are_slower_are_not_taken(larger: Any) -> None:
    slabs, other = in_slabs(), in_slabs()
    tried = outcome(other, larger[0], seconds=larger[1], predicted_to_fit=False)
    compiler = Fake([*misses((PROGRAM, 130)), outcome(slabs, 90, seconds=1.1), tried])
    corrected = {80 / 90: candidate(other, 90, 0.9)}
    result = attempt(compiler, slabs=(slabs,), expected_bytes=(80,), corrected=corrected)
    assert result.program is slabs and compiler.compiled == [slabs]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_closest_attempt_is_the_one_that_is_least_beyond_both_limits(
    order: tuple[int, int],
) -> None:
    slabs = in_slabs(), in_slabs()
    tried = (
        outcome(slabs[0], 130, 0, predicted_to_fit=False),
        outcome(slabs[1], 90, 60, predicted_to_fit=False),
    )
    compiler = Fake([*misses((PROGRAM, 120)), *(tried[number] for number in order)])
    ordered = tuple(slabs[number] for number in order)
    closest = attempt(compiler, slabs=ordered, expected_bytes=(100, 70)).closest_slab_attempt
    assert closest is not None and (
        closest.device_bytes,
        closest.host_bytes,
        closest.excess_bytes,
    ) == (90, 60, 10)


def test_the_outcome_keeps_the_unmodified_step() -> None:
    first, split = outcome(PROGRAM, 120, predicted_to_fit=False), in_slabs()
    result = attempt(Fake([first, 90]), slabs=(split,))
    assert result.program is split and result.unmodified is first.planned.plain


def test_what_is_good_is_compiled_at_once_and_the_others_not_at_all() -> None:
    slabs = tuple(in_slabs() for _ in range(2))
    compiler = Fake([*misses((PROGRAM, 130), (slabs[0], 110)), 90])
    result = attempt(compiler, slabs=slabs)
    assert compiler.compiled == [slabs[1]]
    assert (result.compilations, result.explorations) == (1, 2)


def test_the_best_is_compiled_in_the_end() -> None:
    slow, slabs = outcome(PROGRAM, 90, seconds=2.0), in_slabs()
    compiler = Fake([slow, outcome(slabs, 95, seconds=3.0)])
    result = attempt(compiler, slabs=(slabs,))
    assert result.program is PROGRAM and compiler.compiled == [PROGRAM]
    assert (result.compilations, result.explorations) == (1, 2)


def test_if_nothing_fits_the_smallest_is_compiled() -> None:
    slabs = in_slabs()
    compiler = Fake(misses((PROGRAM, 130), (slabs, 110)))
    assert attempt(compiler, slabs=(slabs,)).device_bytes == 110 and compiler.compiled == [slabs]


def test_if_the_best_exceeds_its_prediction_the_next_is_compiled() -> None:
    fewer = with_residuals(0)
    slow, exceeds = outcome(PROGRAM, 90, seconds=3.0), outcome(fewer, 107, seconds=2.0)
    compiler = Fake([slow, exceeds])
    result = attempt(compiler, programs=(fewer,), tries=1)
    assert result.program is PROGRAM and compiler.compiled == [fewer, PROGRAM]


def test_what_fits_is_taken_even_if_it_takes_more() -> None:
    slabs = in_slabs()
    compiler = Fake([*misses((PROGRAM, 130)), outcome(slabs, 90, 51, predicted_to_fit=False), 100])
    assert attempt(compiler, slabs=(slabs, in_slabs())).device_bytes == 100


@pytest.mark.parametrize("slab", [(101, 1.0), (80, 4.0)])
def test_slabs_that_do_not_fit_or_are_slower_are_not_taken(slab: tuple[int, float]) -> None:
    slabs = in_slabs()
    compiler = Fake(
        [
            outcome(PROGRAM, 90, seconds=3.0),
            outcome(slabs, slab[0], seconds=slab[1], predicted_to_fit=False),
        ]
    )
    assert attempt(compiler, slabs=(slabs,)).program is PROGRAM


@pytest.mark.parametrize(("seconds", "chosen"), [(1.4, "slabs"), (1.6, "whole")])
def test_a_slow_plan_is_compared_with_slabs(seconds: float, chosen: str) -> None:
    slabs = in_slabs()
    compiler = Fake(
        [outcome(PROGRAM, 90, seconds=1.5), outcome(slabs, 95, seconds=seconds, bound_s=1.5)]
    )
    result = attempt(compiler, slabs=(slabs, in_slabs()))
    assert (
        result.program is (slabs if chosen == "slabs" else PROGRAM)
        and result.fits
        and count(result) == 2
    )


def test_after_slabs_that_a_slow_plan_makes_fit_those_are_tried_that_are_expected_to_take_less() -> (
    None
):
    slabs = tuple(in_slabs() for _ in range(3))
    slow = outcome(slabs[0], 100, seconds=2.0)  # of 500 bytes
    compiler = Fake([outcome(PROGRAM, 90, seconds=3.0), slow, outcome(slabs[2], 95, seconds=1.2)])
    result = attempt(compiler, slabs=slabs, expected_bytes=(95, 90, 19))
    assert result.program is slabs[2] and count(result) == 3


def by_index() -> Program:
    return PROGRAM.transformed(Applied(IndexedStacks()), None)


@pytest.mark.parametrize(
    "first", [outcome(PROGRAM, 130, predicted_to_fit=False), outcome(PROGRAM, 90, seconds=1.3)]
)
@pytest.mark.parametrize(("second", "chosen"), [((95, 1.1), True), ((140, 0.5), False)])
def test_where_nothing_fits_or_a_plan_is_slow_stacks_are_read_by_index(
    first: Outcome, second: tuple[int, float], chosen: bool
) -> None:
    indexed = by_index()
    compiler = Fake([first, outcome(indexed, second[0], seconds=second[1], predicted_to_fit=False)])
    result = attempt(compiler, by_index=indexed)
    assert count(result) == 2 and result.program is (indexed if chosen else PROGRAM)


WITH_WORKSPACE = outcome(PROGRAM, 130, predicted_to_fit=False, workspace_bytes=1)  # of 100


@pytest.mark.parametrize(
    ("takes", "seconds", "slower_s", "explored"),
    [(95, 1.1, 0.1, 2), (95, 1.5, 0.5, 3), (95, 1.1, 0.0, 2), (120, 1.0, 0.0, 3)],
)
def test_less_workspace_is_asked_for_before_slabs(
    takes: int, seconds: float, slower_s: float, explored: int
) -> None:
    """Slabs are compared if it does not fit, or is slower than XLA's own algorithms by a quarter."""
    smaller, slabs = by_index(), in_slabs()
    bound_s = 1.0 + slower_s
    fits = outcome(
        smaller, takes, predicted_to_fit=takes < 100, seconds=seconds, bound_s=bound_s, slower_s=slower_s
    )  # fmt: skip
    in_hand = [WITH_WORKSPACE, fits, outcome(slabs, 90, seconds=1.6)][:explored]
    result = attempt(Fake([*in_hand]), slabs=(slabs,), smaller=smaller)
    assert count(result) == explored
    assert result.program is (smaller if takes < 100 else slabs)


@pytest.mark.parametrize(
    "first",
    [outcome(PROGRAM, 130, predicted_to_fit=False), outcome(PROGRAM, 95, workspace_bytes=9)],
)
def test_less_workspace_is_not_asked_for_where_none_is_large_or_the_step_fits(
    first: Outcome,
) -> None:
    slabs = in_slabs()
    takes = [first] if first.fits else [first, outcome(slabs, 90)]
    result = attempt(Fake([*takes]), slabs=(slabs,), smaller=by_index())
    assert result.program is (PROGRAM if first.fits else slabs)


def test_a_fast_plan_keeps_its_stacks() -> None:
    assert (
        attempt(Fake([outcome(PROGRAM, 90, seconds=1.2)]), by_index=by_index()).program is PROGRAM
    )


def test_loops_keep_fewer_residuals_where_their_stacks_are_read_by_index() -> None:
    indexed, fewer = by_index(), with_residuals(0)
    compiler = Fake([*misses((PROGRAM, 130), (indexed, 110)), 95])
    assert attempt(compiler, by_index=indexed, programs=(fewer,)).program is fewer
    assert compiler.missing == [10, 0]


def test_a_plan_stays_where_it_is_fast_or_slabs_are_expected_to_be_slower() -> None:
    assert (
        attempt(Fake([outcome(PROGRAM, 90, seconds=1.25)]), slabs=(in_slabs(),)).program is PROGRAM
    )
    assert (
        attempt(
            Fake([outcome(PROGRAM, 90, seconds=1.5)]), slabs=(in_slabs(),), expected_s=1.6
        ).program
        is PROGRAM
    )


def test_a_plan_that_is_followed_is_tried_in_no_slabs() -> None:
    assert not attempt(Fake([120]), slabs=(in_slabs(),), follow=followed(None)).fits
