"""One order less in the log of a planned step: the detector finds a race exactly where brute force does."""

from __future__ import annotations

import random
from collections import Counter

from tests.gpu_runtime import programs
from tests.gpu_runtime.mutants import mutants
from tests.gpu_runtime.operations import operations
from tests.gpu_runtime.races import races
from tests.gpu_runtime.reachability import has_race

OF_EACH_WAY = 10  # of some hundred, drawn; brute force takes a third of a second for each


def test_orders_that_a_log_loses_are_missed_where_they_are_needed(watched):
    ran = watched(programs.plain_and_planned, "mlp", [0.9], [("random", 3, 1)])
    ops = operations(ran.log)
    everything = list(mutants(ops))
    random.Random(0).shuffle(everything)
    looked_at, needed = Counter[str](), Counter[str]()
    for way, mutant in everything:
        looked_at[way] += 1
        if looked_at[way] > OF_EACH_WAY:
            continue
        found = any(True for _ in races(mutant))
        assert found == has_race(mutant), way
        needed[way] += found
    assert sum(needed.values()) >= 20
    assert sum(count > 0 for count in needed.values()) >= 5  # ways
