"""One order less in the log of a planned step: the detector finds a race exactly where brute force does."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.gpu_runtime import programs
from tests.gpu_runtime.mutants import mutants
from tests.gpu_runtime.operations import operations
from tests.gpu_runtime.races import races
from tests.gpu_runtime.reachability import has_race

OF_EACH_WAY = 10  # of some hundred, drawn; brute force takes a third of a second for each
NEEDED = {  # the host's waits, the other ways, come and go with its threads
    "a wait is dropped",
    "work begins before the wait for it",
    "an event is recorded too early",
    "work is given to another stream",
    "a dependency in a graph is dropped",
}


@pytest.mark.slow  # test_races.py compares the detector with brute force by default
def test_orders_that_a_log_loses_are_missed_where_they_are_needed(watched):
    ran = watched(programs.plain_and_planned, "mlp", [0.9], [("random", 3, 1)])
    ops = operations(ran.log)
    everything = [
        (fault, mutant, any(True for _ in races(mutant))) for fault, mutant in mutants(ops)
    ]
    needed = {fault for fault, _, is_race in everything if is_race}
    assert needed >= NEEDED
    drawn = Counter[str]()
    random.Random(0).shuffle(everything)
    for fault, mutant, is_race in everything:
        drawn[fault] += 1
        if drawn[fault] <= OF_EACH_WAY:
            assert is_race == has_race(mutant), fault
