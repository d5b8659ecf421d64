"""One step as straight-line code, in a branch, in a loop and three levels deep, in equal memory.

A wrapped step has the straight step's budget, plus what the wrapper adds to arguments and outputs:
the batches, predicates and metrics of other trips. Nothing else is added: slices of batches, a
second state in a branch that returns it, and loop carries must fit the straight step's bytes. If
the straight step does not fit its share, its budget is the smallest feasible one. The goal allows a
wrapped step slightly more; if it misses the goal without, it is planned with that, too.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from experiments.bench.cases import Case
from experiments.bench.measures.planned import UNLIMITED
from experiments.bench.results import Measurement, Row
from memplan import pipeline
from memplan.compilation.outcome import Outcome
from memplan.planning.schedule import Kind
from memplan.request import Request
from memplan.results.report import status_of

MORE_BYTES, MORE_SECONDS = 0.03, 0.05  # What a wrapped step may need in addition, as shares.
_SHARES = (80, 60, 40)

Step = Callable[[Any, Any], Any]
"""(state, batch) -> (state, metrics)"""


def measure(case: Case) -> Measurement:
    """A row for each form and share.

    Ratios are over the straight step: planned bytes, plain bytes, both without what the wrapper
    adds, and seconds of a trip.
    """
    return Measurement(list(_rows(case)))


def _rows(case: Case) -> Iterator[Row]:
    step, (state, batch), donated = case.built()

    def planned(form: _Form, budget: int) -> Outcome:
        args, request = (state, form.batches(batch)), Request(budget, device=case.device)
        return pipeline.best(form.wrap(step), args, {}, {"donate_argnums": donated}, request)

    plain = planned(_STRAIGHT, UNLIMITED)
    lines = {share: planned(_STRAIGHT, plain.device_bytes * share // 100) for share in _SHARES}
    for name, form in _FORMS.items():
        unmodified = planned(form, UNLIMITED)
        added = unmodified.executable.memory.resident_bytes - plain.executable.memory.resident_bytes
        for share, line in lines.items():
            room = max(line.device_bytes, line.limits.device_bytes)
            for more in (0, MORE_BYTES):
                outcome = (
                    line if form is _STRAIGHT else planned(form, int((1 + more) * room) + added)
                )
                if outcome.fits and outcome.step_s <= (1 + MORE_SECONDS) * form.trips * line.step_s:
                    break
                if outcome.device_bytes - added > (1 + MORE_BYTES) * room:
                    break  # the smallest plan is the same for every budget
            yield {
                "form": name, "share": share, "status": status_of(outcome), "added_bytes": added,
                "room_bytes": room,
                "plain_ratio": (unmodified.device_bytes - added) / plain.device_bytes,
                "bytes_ratio": (outcome.device_bytes - added) / room,
                "step_s": outcome.step_s / form.trips,
                "seconds_ratio": outcome.step_s / form.trips / line.step_s, **_decided(outcome),
            }  # fmt: skip


def _decided(outcome: Outcome) -> Row:
    """Recomputations in the module, bytes that a step moves to the host, loops, compilations."""
    runs = sum(action.kind is Kind.RUN for action in outcome.planned.schedule)
    return {
        "way": outcome.method,
        "again": runs - len(outcome.planned.base.problem.kernels) if outcome.planned.plan else 0,
        "offloaded_bytes": int(outcome.planned.result.replay.copied_out_nbytes),
        "slab_loops": sum(len(record.loops) for record in outcome.program.in_slabs),
        "compilations": outcome.compilations,
    }  # fmt: skip


@dataclass(frozen=True)
class _Form:
    """How a step is wrapped."""

    wrap: Callable[[Step], Step]
    predicate: bool = False  # of each trip, beside its batch
    sizes: tuple[int, ...] = ()  # trips of each loop

    @property
    def trips(self) -> int:
        return math.prod(self.sizes)

    def batches(self, batch: Any) -> Any:
        trip = (jax.ShapeDtypeStruct((), jnp.bool_), batch) if self.predicate else batch
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((*self.sizes, *leaf.shape), leaf.dtype), trip
        )


def _in_a_branch(step: Step) -> Step:
    """Run the step in a branch; the other branch returns the state."""

    def idle(state: Any, batch: Any) -> Any:
        return state, jax.tree.map(jnp.zeros_like, jax.eval_shape(step, state, batch)[1])

    return lambda state, trip: jax.lax.cond(trip[0], step, idle, state, trip[1])


def _in_a_body(step: Step) -> Step:
    return lambda state, batches: jax.lax.scan(step, state, batches)


_STRAIGHT = _Form(lambda step: step)
_FORMS: Mapping[str, _Form] = {
    "straight": _STRAIGHT,
    "branch": _Form(_in_a_branch, predicate=True),
    "body": _Form(_in_a_body, sizes=(3,)),
    "three deep": _Form(
        lambda step: _in_a_body(_in_a_body(_in_a_branch(step))), predicate=True, sizes=(2, 2)
    ),
}
