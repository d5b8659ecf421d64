"""Texts that a change of the representation leaves as they are: jaxprs, reports, errors.

Jaxprs are those of steps in slabs and of loops that keep fewer residuals. Reports and errors are of
steps that are compiled for a CPU of two cores with 8 GiB, whatever runs the tests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

import memplan
from memplan import request
from memplan.errors import InfeasibleBudgetError
from memplan.hardware import catalog
from memplan.program.loops.choose import ResidualChoices
from memplan.program.loops.stacks import with_indexed_stacks
from memplan.program.slabs.choose import SlabChoices
from memplan.program.trace import Program, comparable, trace
from tests.goldens.planned import FOLDER
from tests.goldens.steps import STEPS, array

RELEASE = "0.12.0.1"  # of jax, that made the files
V100 = catalog.named("v100")
CPU = catalog.local_cpu(2, 2**33)
# Entries of a report that tell of the machine, of the release, or of seconds.
_OF_THE_MACHINE = {"versions", "timeline", "device", "fingerprint", "program", "efficiency"}
_PATH = re.compile(r"[^\s\"'(]*/(?=[\w.\-]+\.py\b)")
_SECONDS = re.compile(r"\b\d[\d.,]* ?(?:s|ms|us|µs|ns|seconds?)\b")


def path(name: str) -> Any:
    return FOLDER / "texts" / name


def traced(name: str) -> Program:
    step = STEPS[name]
    return trace(step.function, step.arguments, {}, step.options)


def in_slabs(name: str, nbytes: int) -> str:
    """The equations of the likeliest program in slabs for a device of so many bytes."""
    program = traced(name)
    candidates = SlabChoices(program, V100).programs(nbytes, V100.memory_bytes, 10.0)
    return _equations(next(candidates).write())


def with_fewer_residuals(name: str, nbytes: int) -> str:
    """The equations with loops that keep so many bytes fewer."""
    step = traced(name)
    choices = ResidualChoices(step, V100)
    choice = choices.fewer(step, V100.memory_bytes, nbytes)
    assert choice is not None
    return _equations(choices.write(choice))


def summed(weight: jax.Array, batches: jax.Array) -> jax.Array:
    """A loop over large slices that no other loop reads."""

    def add(total: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        product = jnp.tanh(batch @ weight)
        return total + product.sum(), product

    total, products = jax.lax.scan(add, jnp.zeros(()), batches)
    return products * total


def with_stacks_by_index(step: Callable[..., Any]) -> str:
    program = with_indexed_stacks(trace(step, (array(256, 256), array(8, 1024, 256)), {}, {}))
    assert program is not None
    return _equations(program)


def _equations(program: Program) -> str:
    text = comparable(str(program.jaxpr))
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


@contextmanager
def two_cores() -> Iterator[None]:
    with mock.patch.object(request, "local_device", return_value=CPU):
        yield


def report(name: str, share: float) -> str:
    """The report of a step that is planned for a share of its bytes."""
    step = STEPS[name]
    with two_cores():
        unplanned = memplan.jit(step.function, **step.options).plan(*step.arguments)
        budget = int(share * (unplanned.report.compiled_peak_bytes or 0))
        planned = memplan.jit(step.function, budget=budget, split=False, **step.options)
        document = json.loads(planned.plan(*step.arguments).report.to_json())
    return json.dumps(_lasting(document), indent=1) + "\n"


def _lasting(value: Any) -> Any:
    """Without seconds, versions and paths."""
    if isinstance(value, Mapping):
        return {
            name: _lasting(entry)
            for name, entry in value.items()
            if not name.endswith(("_s", "seconds")) and name not in _OF_THE_MACHINE
        }
    if isinstance(value, list):
        return [_lasting(entry) for entry in value]
    return _without_paths(value) if isinstance(value, str) else value


def _without_paths(text: str) -> str:
    return _SECONDS.sub("SECONDS", _PATH.sub("", text))


def refusal(name: str, budget: int, **options: Any) -> str:
    """The error of a step that does not fit."""
    step = STEPS[name]
    with two_cores(), pytest.raises(InfeasibleBudgetError) as caught:
        memplan.jit(step.function, budget=budget, **step.options, **options).plan(*step.arguments)
    return _without_paths(str(caught.value)) + "\n"


TEXTS: Mapping[str, Callable[[], str]] = {
    "slabs-u-net-3d.jaxpr": lambda: in_slabs("slabs", 160 << 20),
    "slabs-pooling.jaxpr": lambda: in_slabs("pooling", 12 << 20),
    "slabs-mlp.jaxpr": lambda: in_slabs("mlp", 16 << 20),
    "residuals-scanned.jaxpr": lambda: with_fewer_residuals("scanned", 8 << 20),
    "residuals-decoder-scanned.jaxpr": lambda: with_fewer_residuals("decoder-scanned", 64 << 20),
    "stacks-summed.jaxpr": lambda: with_stacks_by_index(summed),
    "report-mlp.json": lambda: report("mlp", 0.8),
    "report-conv-net.json": lambda: report("conv-net", 0.8),
    "report-custom-vjp.json": lambda: report("custom-vjp", 0.8),
    "report-embedding.json": lambda: report("embedding", 0.9),
    "refusal-mlp.txt": lambda: refusal("mlp-undonated", 1 << 20),
    "refusal-conv-net.txt": lambda: refusal("conv-net", 1 << 20, split=False),
    "refusal-looping.txt": lambda: refusal("looping", 1 << 20, split=False),
    "refusal-pooling-v100.txt": lambda: refusal("pooling", 1 << 20, split=False, device="v100"),
}
"""By the name of the file."""

SLOW = frozenset(
    {"slabs-u-net-3d.jaxpr", "report-mlp.json", "report-conv-net.json", "refusal-conv-net.txt"}
)
ON_GPUS = frozenset(name for name in TEXTS if "v100" in name)
