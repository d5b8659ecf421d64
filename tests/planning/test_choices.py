"""Decisions as solutions of the program, and back."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from memplan.planning.choices import Choices
from memplan.planning.neighbours import improve
from memplan.planning.planners.protocol import Problem, rank
from memplan.planning.reach import Reach
from memplan.planning.simulate import Simulator
from memplan.planning.trial import Trials
from memplan.planning.unfold import Decisions, Demand, Mode, unfold
from tests.planning.graphs import DRAWS, UNIT, layout_of, random_decisions, random_graph, training_chain

PLENTY = 10**9
FOREVER = float("inf")


@settings(max_examples=80, deadline=None)
@given(DRAWS, st.booleans())
def test_decisions_are_a_solution_that_stands_for_the_same_plan(draw: random.Random, with_host: bool) -> None:
    """Any decisions are possible once the program may go as deep as they do and has as many bytes."""
    graph = random_graph(draw, most=14)
    layout, simulator = layout_of(graph), Simulator(graph, UNIT)
    modes = (Mode.DROP, Mode.OFFLOAD_NOW) if with_host else (Mode.DROP,)
    drawn = random_decisions(draw, layout, modes)
    decisions = {(value, when): mode for (value, when), mode in drawn.items() if value not in layout.returned}
    again = Demand.of(layout, decisions).again
    also = frozenset((v, n) for n, ops in enumerate(again) for op in ops for v in graph.ops[op].outputs)
    problem = Problem(graph, UNIT, PLENTY, PLENTY if with_host else 0)
    choices = Choices(problem, Reach(layout, 1, 0, 0, also), simulator)
    start = choices.values(decisions)
    fixed = choices.solver.solve(10.0, 0.0, start, np.zeros(len(start), dtype=bool))
    assume(_is_covered(choices, decisions))
    assert fixed.values is not None
    assert unfold(layout, choices.decisions(fixed.values)) == unfold(layout, decisions)


def _is_covered(choices: Choices, decisions: Decisions) -> bool:
    """Left out are elementwise values that only chains read, and copies to the host and back at once."""
    reach = choices.reach
    for value, numbers in Demand.of(reach.layout, decisions).uses.items():
        for key in ((value, when) for when in numbers if value in reach.times):
            if key not in (choices.moved if key in decisions else choices.held):
                return False
    return True


@settings(max_examples=60, deadline=None)
@given(DRAWS)
def test_a_plan_fits_the_program_where_it_fits_the_simulator(draw: random.Random) -> None:
    graph = training_chain([draw.randint(1, 9) for _ in range(5)], flops=20.0)
    layout = layout_of(graph)
    kept = Trials(Problem(graph, UNIT, PLENTY, 0), layout, "milp").of({})
    peak, costs = max(kept.peaks), []
    for budget in (peak + 10, peak, peak - 1):
        simulator = Simulator(graph, UNIT)
        choices = Choices(Problem(graph, UNIT, budget, 0), Reach(layout, 1, 9, 9), simulator)
        choices.keep_to(choices.rests({}, kept.peaks))
        start = choices.values({})
        costs.append(choices.solver.solve(10.0, 0.0, start, np.zeros(len(start), dtype=bool)).cost)
    assert costs[0] == costs[1] < costs[2]


@settings(max_examples=40, deadline=None)
@given(DRAWS)
def test_a_search_never_loses_what_it_starts_from(draw: random.Random) -> None:
    graph = random_graph(draw, most=14)
    layout = layout_of(graph)
    problem = Problem(graph, UNIT, draw.randint(10, 120), draw.choice([0, PLENTY]))
    modes = (Mode.DROP, Mode.OFFLOAD_NOW) if problem.host_budget_bytes else (Mode.DROP,)
    trials = Trials(problem, layout, "milp")
    start = trials.of(random_decisions(draw, layout, modes))
    found = improve(trials, start, FOREVER)
    assert rank(found) <= rank(start.proposal)
    assert (found.gap_s is not None and found.gap_s >= 0) == found.fits
