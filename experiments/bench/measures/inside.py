"""One step as a straight line, and in a branch, in the body of a loop, and three deep, within the same bytes.

A wrapped step has the straight one's budget, and what the wrapper adds to arguments and outputs by the compiler: the
batches, predicates and metrics of other trips. Nothing else is added: slices of batches, a second state for a branch
that gives it back, and what a loop carries have to be within the straight line's bytes. Where the straight line does
not fit its share, its budget is the smallest that works. The goal allows a wrapped step a little more: where it misses
the goal without, it is planned so, too.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from experiments.bench.cases import Case
from experiments.bench.measures.planned import UNLIMITED
from experiments.bench.results import Found, Row
from memplan import pipeline
from memplan.compilation.outcome import Outcome
from memplan.planning.schedule import Kind
from memplan.request import Request
from memplan.results.report import status_of

MORE_BYTES, MORE_SECONDS = 0.03, 0.05  # that a wrapped step may need
_SHARES = (80, 60, 40)

Step = Callable[[Any, Any], Any]
"""(state, batch) -> (state, metrics)"""


def measure(case: Case) -> Found:
    """A row for each form and share.

    Ratios are over the straight line: of the bytes within the budget and of those as it is, both without what the
    wrapper adds, and of the seconds of a trip.
    """
    return Found(list(_rows(case)))


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
                found = line if form is _STRAIGHT else planned(form, int((1 + more) * room) + added)
                if found.fits and found.step_s <= (1 + MORE_SECONDS) * form.trips * line.step_s:
                    break
                if found.device_bytes - added > (1 + MORE_BYTES) * room:
                    break  # the smallest is the same for every budget
            yield {
                "form": name, "share": share, "status": status_of(found), "added_bytes": added, "room_bytes": room,
                "plain_ratio": (unmodified.device_bytes - added) / plain.device_bytes,
                "bytes_ratio": (found.device_bytes - added) / room, "step_s": found.step_s / form.trips,
                "seconds_ratio": found.step_s / form.trips / line.step_s, **_decided(found),
            }  # fmt: skip


def _decided(found: Outcome) -> Row:
    """Runs of kernels that are not their first, in the module's text; what goes to the host in a step."""
    runs = sum(one.kind is Kind.RUN for one in found.planned.schedule)
    return {
        "way": found.method, "again": runs - len(found.planned.base.problem.kernels) if found.planned.plan else 0,
        "offloaded_bytes": int(found.planned.result.replay.copied_out_nbytes),
        "slab_loops": sum(len(one.loops) for one in found.program.in_slabs), "compilations": found.compilations,
    }  # fmt: skip


@dataclass(frozen=True)
class _Form:
    """A way to run a step."""

    wrap: Callable[[Step], Step]
    predicate: bool = False  # of each trip, beside its batch
    sizes: tuple[int, ...] = ()  # trips of each loop

    @property
    def trips(self) -> int:
        return math.prod(self.sizes)

    def batches(self, batch: Any) -> Any:
        trip = (jax.ShapeDtypeStruct((), jnp.bool_), batch) if self.predicate else batch
        return jax.tree.map(lambda one: jax.ShapeDtypeStruct((*self.sizes, *one.shape), one.dtype), trip)


def _in_a_branch(step: Step) -> Step:
    """The other one gives the state back."""

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
    "three deep": _Form(lambda step: _in_a_body(_in_a_body(_in_a_branch(step))), predicate=True, sizes=(2, 2)),
}
