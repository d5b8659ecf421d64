"""Costs of the alternatives to each decision: by hand, and against memory over time."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations_with_replacement

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.hardware import catalog
from memplan.hardware.roofline import copy_seconds
from memplan.planning.problem import Buffer, Kernel, Pin, Problem, Role, Where
from memplan.planning.schedule import seconds
from memplan.report.decisions import Choices
from memplan.results.choices import Prices
from tests.planning.small import actions
from tests.results.copied import report_with_copies
from tests.xla.test_target import needs_compiler


def there_and_back(count: int) -> Problem:
    """A chain that is read backwards; buffers take 100 bytes, kernels a second.

    Kernel `count + i` reads buffer `count - 1 - i`, and the gradient before it.
    """
    buffers = tuple(Buffer(f"{i}", 100, Role.TEMPORARY, i, i) for i in range(2 * count))
    forward = [Kernel(f"{i}", (i - 1,) if i else (), (i,), seconds=1.0) for i in range(count)]
    read = [(count - 1 - i, *((count + i - 1,) if i else ())) for i in range(count)]
    back = [Kernel(f"{count + i}", read[i], (count + i,), seconds=1.0) for i in range(count)]
    return Problem(buffers, (*forward, *back), (2 * count - 1,), frozenset())


PLAIN = tuple(actions(", ".join(f"run {i}" for i in range(6))))


def taking(problem: Problem, took_s: Sequence[float]) -> Problem:
    pairs = zip(problem.kernels, took_s, strict=True)
    return replace(problem, kernels=tuple(replace(kernel, seconds=float(s)) for kernel, s in pairs))


def slow_copy(nbytes: int) -> float:
    return nbytes / 100  # a second for each buffer


def test_a_kept_value_could_be_recomputed_or_offloaded() -> None:
    prices = Prices(there_and_back(3), PLAIN, slow_copy, 1000)
    # 0 is made at 1 second and read last at 5, copies take two; of 1, from 2 to 4, they fit exactly
    assert [prices.of(value, "keep", 0.0) for value in (0, 1)] == [Choices(0, 1.0, 2.0, 0.0)] * 2
    # 2 is read at once: kernels wait for both of its copies
    assert prices.of(2, "keep", 0.0) == Choices(0, 1.0, 2.0, 2.0)


def test_links_that_are_busy_hide_less() -> None:
    travels = actions(
        "run 0, offload 0, run 1, run 2, run 3, offloaded 0, prefetch 0, run 4, prefetched 0, run 5"
    )
    alone, beside = (
        Prices(there_and_back(3), plan, lambda nbytes: nbytes / 80, 1000).of(1, "keep", 0.0)
        for plan in (PLAIN, travels)
    )
    # out from 2 to 3.25, for which 3 waits, and back from then to 4.5, while the kernel in between
    # ends at 4.25
    assert alone == Choices(0, 1.0, 2.5, 0.5)
    # buffer 0 goes out from 1 to 2.25, so 1 from then to 3.5; the link back is taken from 4 on
    assert beside == Choices(0, 1.0, 2.5, 2.5)


SECONDS = st.lists(st.integers(1, 6), min_size=8, max_size=8)


@given(SECONDS, st.integers(1, 9), st.sampled_from(["", "offload 0 run 1", "offload 0 run 3"]))
def test_a_plan_with_the_copies_stalls_no_longer(took_s: list[int], copy_s: int, busy: str) -> None:
    """Independently: the best of all positions of the copies in the schedule."""
    problem = taking(there_and_back(4), took_s)
    runs = [f"run {number}" for number in range(8)]
    if busy:  # buffer 0 is on the host
        runs.insert(1, "offload 0")
        at = runs.index(busy.removeprefix("offload 0 ")) + 1
        runs[at:at] = ["offloaded 0"]
        runs[-1:-1] = ["prefetch 0"]
        runs[-1:-1] = ["prefetched 0"]
    prices = Prices(problem, actions(*runs), lambda _: float(copy_s), 1000)
    plain_s = seconds(problem, actions(*runs), lambda _: float(copy_s))
    for value, reader in ((1, "run 6"), (2, "run 5")):
        written, read = runs.index(f"run {value}") + 1, runs.index(reader)
        best_s = min(
            seconds(problem, actions(*_with_copies(runs, value, places)), lambda _: float(copy_s))
            for places in combinations_with_replacement(range(written, read + 1), 3)
        )
        choices = prices.of(value, "keep", 0.0)
        assert best_s <= plain_s + choices.host_wait_s + 1e-9


def _with_copies(runs: list[str], value: int, places: tuple[int, ...]) -> list[str]:
    """The copy out starts and ends, and the copy back starts, at these positions."""
    out, offloaded, back = places
    reader = runs.index(f"run {7 - value}")
    actions = list[str]()
    for at, run in enumerate(runs):
        actions += [f"offload {value}"] * (at == out) + [f"offloaded {value}"] * (at == offloaded)
        actions += [f"prefetch {value}"] * (at == back) + [f"prefetched {value}"] * (at == reader)
        actions.append(run)
    return actions


def test_one_long_kernel_hides_one_copy() -> None:
    """The copy back starts at the end of the kernel that hides the copy out."""
    problem = taking(there_and_back(2), (1.0, 9.0, 1.0, 1.0))
    long = Prices(problem, PLAIN[:4], slow_copy, 1000).of(0, "keep", 0.0)
    assert long.host_wait_s == 0.0  # back beside kernel 2
    short = Prices(there_and_back(2), PLAIN[:4], lambda _: 1.5, 1000).of(0, "keep", 0.0)
    assert short.host_wait_s == 1.5 + 1.5 - 2.0


def test_waits_are_the_plans_own() -> None:
    travels = actions(
        "run 0, offload 0, run 1, offloaded 0, run 2, run 3, run 4, prefetch 0, prefetched 0, run 5"
    )
    # out: from 1 to 5 seconds, while 1 ends at 2; back: from 8 to 12, which 5 waits for
    choices = Prices(there_and_back(3), travels, lambda nbytes: nbytes / 25, 1000).of(
        0, "offload", 8.0
    )
    # while 3 runs, 1, 2 and its own result are there, the most that ever is: with 0, 100 bytes more
    assert choices == Choices(100, 1.0, 8.0, 3.0 + 4.0)


def test_operands_that_are_not_alive_are_recomputed_too() -> None:
    again = actions("run 0, run 1, run 2, run 3, run 4, run 1, run 2, run 5, run 6, run 7")
    prices = Prices(there_and_back(4), again, None, 0)
    # while 4 runs, 0, 3 and its own result are there: with 1 or 2, no more than while 1 and 2 run
    # again
    assert prices.of(2, "recompute", 1.0) == Choices(0, 1.0, None, None, "", "no link")
    # before 4 reads it, 3 would be made from 2, and that from 1, which are made again for 5 only; 0
    # is there
    assert prices.of(3, "keep", 0.0) == Choices(0, 3.0, None, None, "", "no link")


def test_an_impossible_choice_says_why() -> None:
    problem = there_and_back(3)
    kept, away = Pin("a", Where.DEVICE), Pin("b", Where.HOST)
    first, second, *more = problem.buffers
    buffers = replace(first, pin=kept), replace(second, pin=away), *more
    prices = Prices(replace(problem, buffers=buffers), PLAIN, slow_copy, 1000)
    assert prices.of(0, "keep", 0.0) == Choices(0, None, None, None, "pinned", "pinned")
    choices = prices.of(1, "keep", 0.0)
    assert choices and (choices.no_recompute, choices.no_host) == ("pinned", "")
    full = Prices(problem, PLAIN, slow_copy, 99).of(0, "keep", 0.0)
    assert full and (full.host_s, full.no_host) == (None, "the host's budget is full")
    effects = replace(
        problem, kernels=(replace(problem.kernels[0], recomputable=False), *problem.kernels[1:])
    )
    once = Prices(effects, PLAIN, slow_copy, 1000).of(0, "keep", 0.0)
    assert once and (once.recompute_s, once.no_recompute) == (None, "it runs once")
    assert prices.of(5, "keep", 0.0) is None  # the output


@needs_compiler
@pytest.mark.gpu_aot
def test_prices_of_a_compiled_plan() -> None:
    """Independently: bytes by memory over time, seconds by the data sheet."""
    report = report_with_copies()
    timeline, v100 = report.timeline, catalog.named("v100")
    assert timeline is not None
    priced = [row for row in report.decisions if row.choices is not None]
    assert {row.decision for row in priced} == {"keep", "offload", "recompute"}
    for row in priced:
        choices = row.choices
        assert choices.keep_bytes == 0 or row.decision != "keep"
        copies = choices.host_s / copy_seconds(row.nbytes, v100)
        assert copies == pytest.approx(round(copies)) and (
            round(copies) == 2 or row.decision == "offload"
        )
        assert 0 <= choices.host_wait_s <= choices.host_s
    on_host = [row for row in priced if row.decision == "offload"]
    waits_s = sum(row.choices.host_wait_s for row in on_host)
    assert waits_s == pytest.approx(report.stall_s, abs=1e-6)
    checked = 0
    for row in on_host:
        on_device = [stay for stay in timeline.stays if stay.place == "device"]
        stays = [stay for stay in on_device if timeline.values[stay.value].buffer == row.name]
        instants = {instant for stay in stays for instant in range(stay.first, stay.last)}
        absent = set(range(min(instants, default=0), max(instants, default=0))) - instants
        between = [timeline.instants[instant].device_bytes for instant in absent]
        if not between:  # it has the place of an argument, before or after
            continue
        higher = max(0, max(between) + row.nbytes - report.predicted_peak_bytes)
        assert row.choices.keep_bytes == pytest.approx(higher, abs=1024)
        checked += 1
    assert checked
