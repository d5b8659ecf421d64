"""A plan that somebody edited is refused, or followed to what the step computes."""

import json
import random
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import memplan
from memplan import Plan
from tests.arrays import assert_close

KINDS = ("run", "offload", "offloaded", "prefetch", "prefetched")
NUMBERS = (-1, 0, 1, 2, 7, 99, 2**40)


def step(params: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    def loss(params: list[jax.Array]) -> jax.Array:
        hidden = x
        for weight in params:
            hidden = jnp.sin(hidden @ weight)
        return (hidden**2).mean()

    value, gradients = jax.value_and_grad(loss)(params)
    return [
        weight - 0.1 * gradient for weight, gradient in zip(params, gradients, strict=True)
    ], value


def actions(draw: random.Random, document: dict[str, Any]) -> None:
    """One action less, twice, elsewhere, of another kind or of another name."""
    listed = document["actions"]
    place = draw.randrange(len(listed))
    kind, name = listed.pop(place)
    match draw.choice(["drop", "twice", "move", "kind", "name"]):
        case "twice":
            listed[place:place] = [[kind, name]] * 2
        case "move":
            listed.insert(draw.randrange(len(listed)), [kind, name])
        case "kind":
            listed.insert(place, [draw.choice(KINDS), name])
        case "name":
            listed.insert(place, [kind, draw.choice(listed)[1]])
    document["length"] = len(listed)


_PAIRS = ("recomputed_in", "inside", "on_device")  # entries of slabs that are lists of pairs


def slabs(draw: random.Random, document: dict[str, Any]) -> None:
    """Another number, one less or one more, in an entry of the slabs."""
    (entry,) = document["transforms"]
    name = draw.choice([name for name in entry if name != "tag"])
    if isinstance(entry[name], int):
        entry[name] = draw.choice([entry[name] + 1, entry[name] - 1, *NUMBERS])
    elif entry[name] and draw.random() < 0.5:
        entry[name].pop(draw.randrange(len(entry[name])))
    else:
        pair = [draw.choice(NUMBERS), draw.choice(NUMBERS)]
        entry[name].append(pair if name in _PAIRS else pair[0])


def transforms(draw: random.Random, document: dict[str, Any]) -> None:
    """A transform less, twice, or one that the plan does not have."""
    residuals = {"kept": [draw.choice(NUMBERS)], "on_host": [], "segments": draw.choice(NUMBERS), "segment_trips": 1,
                 "snapshots_on_host": []}  # fmt: skip
    entries = document["transforms"]
    change = draw.choice(["drop", "twice", "add"])
    if entries and change == "drop":
        entries.pop()
    elif entries and change == "twice":
        entries.append(entries[0])
    else:
        inputs = [draw.choice(NUMBERS)]
        added = draw.choice(
            [
                {"tag": "residuals", "residuals": [draw.choice([residuals, None])]},
                {"tag": "state on the host", "inputs": inputs, "streams": draw.random() < 0.5},
                {"tag": "indexed stacks"},
                {"tag": "tiles"},
            ]
        )
        entries.insert(draw.randrange(len(entries) + 1), added)


def other_entries(draw: random.Random, document: dict[str, Any]) -> None:
    """Another value of one of the other entries."""
    name = draw.choice(["rewritten_for_nbytes", "extra_outputs", "overlapped", "length"])
    document[name] = {
        "rewritten_for_nbytes": draw.choice(NUMBERS),
        "extra_outputs": [draw.choice(document["actions"])[1]],
        "overlapped": [draw.choice(NUMBERS), True],
        "length": draw.choice(NUMBERS),
    }[name]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("budget", "edit"),  # 0.7: with recomputations; 0.3: in slabs
    [
        (0.7, actions),
        (0.7, transforms),
        (0.7, other_entries),
        (0.3, actions),
        (0.3, slabs),
        (0.3, transforms),
        (0.3, other_entries),
    ],
)
def test_an_edited_plan_is_refused_or_computes_the_step(
    budget: float, edit: Callable[[random.Random, dict[str, Any]], None]
) -> None:
    key = jax.random.key(0)
    args = (
        [0.1 * jax.random.normal(key, (32, 32)) for _ in range(6)],
        jax.random.normal(key, (4096, 32)),
    )
    expected = jax.tree.leaves(jax.jit(step)(*args))
    whole = memplan.api.report(step, args).compiled_peak_bytes
    text = memplan.jit(step, budget=int(budget * whole)).plan(*args).plan.to_json()
    tags = [transform["tag"] for transform in json.loads(text)["transforms"]]
    assert tags == (["slabs"] if budget == 0.3 else [])
    draw, refusals = random.Random(3), list[str]()
    for _ in range(25):
        document = json.loads(text)
        edit(draw, document)
        try:
            plan = Plan.from_json(json.dumps(document))
            # that it is planned again
            with warnings.catch_warnings(action="ignore", category=UserWarning):
                results = memplan.jit(step, plan=plan)(*args)
        except memplan.MemplanError as error:
            refusals.append(str(error))
            continue
        assert_close(results, expected, rtol=1e-4, atol=1e-6)
    assert refusals and not [
        refusal for refusal in refusals if "this is a bug in memplan" in refusal
    ]
