"""The judge refuses every kind of illegal action by name, and agrees with a tiny judge of another make."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings

from memplan.errors import MemplanError, PlanMismatchError
from memplan.planning.graph import Graph
from memplan.planning.plan import FENCE, Action, Kind, Plan
from memplan.planning.unfold import unfold
from memplan.verify.plan import IllegalPlanError, judge
from tests.planning.graphs import DRAWS, Builder, layout_of, random_decisions, random_graph

C, F, OUT, IN, R = Kind.COMPUTE, Kind.FREE, Kind.OFFLOAD, Kind.PREFETCH, Kind.RELEASE


def small() -> Graph:
    """0 -> first -> 1 -> print (once) -> 2 -> last -> 3."""
    b = Builder()
    x = b.argument(1)
    first = b.op([x], 10, name="first", source="net.py:3")
    shown = b.op([first], 20, name="print", source="net.py:4", recomputable=False, why_not="it prints")
    return b.build(b.op([shown], 5, name="last", workspace_nbytes=100))


def plan(*actions: tuple[Kind, int] | Action) -> Plan:
    return Plan(tuple(a if isinstance(a, Action) else Action(*a) for a in actions), "a program", "test")


def test_a_legal_plan_is_counted() -> None:
    account = judge(
        plan((C, 0), (OUT, 1), (F, 1), FENCE, (IN, 1), (R, 1), (C, 1), (F, 1), (C, 0), (F, 1), (C, 2), (F, 2)), small()
    )
    assert account.peak_nbytes == 1 + 20 + 5 + 100
    assert (account.host_peak_nbytes, account.offloaded_nbytes, account.recomputed) == (10, 10, {0: 1})


@pytest.mark.parametrize(
    ("actions", "says"),
    [
        ([(C, 1)], r"action 0: print \(net.py:4\) reads kernel:1, which is not on the device"),
        ([(C, 0), (C, 1), (F, 2), (C, 2)], r"action 3: last reads kernel:2"),
        ([(C, 0), (C, 1), (C, 1)], r"action 2: print \(net.py:4\) would run twice: it prints"),
        ([(OUT, 1)], "action 0: kernel:1 is copied out but not on the device"),
        ([(C, 0), (OUT, 1), (OUT, 1)], "action 2: kernel:1 is copied out twice"),
        ([(C, 0), (IN, 1)], "action 1: kernel:1 is fetched but not on the host"),
        ([(C, 0), (OUT, 1), (R, 1), (IN, 1)], "action 3: kernel:1 is fetched but not on the host"),
        ([(F, 1)], "action 0: kernel:1 is freed but not on the device"),
        ([(C, 0), (F, 1), (F, 1)], "action 2: kernel:1 is freed but not on the device"),
        ([(R, 1)], "action 0: kernel:1 is released but not on the host"),
        ([(C, 0), (C, 1)], "action 2: the outputs kernel:3 are not there at the end"),
        ([(C, 0), (C, 1), (C, 2), (F, 3)], "the outputs kernel:3 are not there"),
        ([], "the outputs kernel:3"),
        ([(C, 3)], "action 0: compute of unknown 3"),
        ([(C, -1)], "action 0: compute of unknown -1"),
        ([(F, 4)], "action 0: free of unknown 4"),
    ],
)
def test_illegal_actions_are_named(actions: list[tuple[Kind, int]], says: str) -> None:
    with pytest.raises(IllegalPlanError, match=says) as caught:
        judge(plan(*actions), small())
    assert isinstance(caught.value, MemplanError) and "a fault of the planner" in str(caught.value)


def test_effects_may_not_be_left_out_or_swapped() -> None:
    b = Builder()
    x = b.argument(1)
    for name in ("hello", "world"):
        b.op([x], 1, name=name, recomputable=False, why_not="it prints")
    graph = b.build(x)
    judge(plan((C, 0), (C, 1)), graph)
    with pytest.raises(IllegalPlanError, match="world never runs"):
        judge(plan((C, 0)), graph)
    with pytest.raises(IllegalPlanError, match="effects are out of order"):
        judge(plan((C, 1), (C, 0)), graph)


def test_plans_for_another_program_are_not_even_replayed() -> None:
    with pytest.raises(PlanMismatchError):
        judge(replace(plan((C, 99)), fingerprint="another"), small())


def tiny_judge(actions: list[Action], graph: Graph) -> bool:
    """Legality by looking back from each action, with nothing kept between them."""

    def there(value: int, now: int) -> bool:
        for action in reversed(actions[:now]):
            if action == Action(F, value):
                return False
            if action == Action(IN, value) or (action.kind is C and value in graph.ops[action.target].outputs):
                return True
        return value in graph.inputs

    def hosted(value: int, now: int) -> bool:
        last = [a.kind for a in actions[:now] if a.target == value and a.kind in (OUT, R)][-1:]
        return last == [OUT]

    for now, action in enumerate(actions):
        fine = {
            C: lambda op, now=now: all(there(value, now) for value in graph.ops[op].inputs),
            F: lambda value, now=now: there(value, now),
            OUT: lambda value, now=now: there(value, now) and not hosted(value, now),
            IN: lambda value, now=now: hosted(value, now),
            R: lambda value, now=now: hosted(value, now),
            Kind.FENCE: lambda _: True,
        }[action.kind]
        if not fine(action.target):
            return False
    effects = [a.target for a in actions if a.kind is C and not graph.ops[a.target].recomputable]
    wanted = [number for number, op in enumerate(graph.ops) if not op.recomputable]
    return effects == wanted and all(there(value, len(actions)) for value in graph.outputs)


def mutated(draw: random.Random, actions: list[Action], graph: Graph) -> list[Action]:
    """One action left out, doubled, moved or aimed elsewhere."""
    if not actions:
        return actions
    changed, at = list(actions), draw.randrange(len(actions))
    match draw.choice(["drop", "double", "swap", "aim"]):
        case "drop":
            del changed[at]
        case "double":
            changed.insert(draw.randrange(at, len(actions) + 1), changed[at])
        case "swap":
            other = draw.randrange(len(actions))
            changed[at], changed[other] = changed[other], changed[at]
        case "aim":
            known = {C: len(graph.ops), Kind.FENCE: 1}.get(changed[at].kind, len(graph.values))
            changed[at] = replace(changed[at], target=draw.randrange(known))
    return changed


@settings(max_examples=250, deadline=None)
@given(DRAWS)
def test_a_mutated_plan_is_refused_unless_it_is_still_legal(draw: random.Random) -> None:
    graph = random_graph(draw, most=8)
    layout = layout_of(graph)
    actions = list(unfold(layout, random_decisions(draw, layout))[0])
    for _ in range(4):
        changed = mutated(draw, actions, graph)
        try:
            judge(plan(*changed), graph)
            legal = True
        except IllegalPlanError:
            legal = False
        assert legal == tiny_judge(changed, graph)


def test_the_judge_needs_no_jax() -> None:
    code = "import sys, memplan.verify.plan; assert not {'jax', 'numpy', 'flax'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
