"""Steps planned for a described TPU: the bytes are XLA:TPU's, the budgets hold, mutants are refused.

Nothing here runs: there is no TPU.
"""

from __future__ import annotations

import functools
import importlib.util
import random
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import memplan
from memplan import pipeline
from memplan.compilation.outcome import Outcome
from memplan.errors import InfeasibleBudgetError
from memplan.request import Request
from memplan.studies.compare import compare
from memplan.verify.dataflow import NotThePlainModuleError
from memplan.verify.same_module import judge
from memplan.xla.edit import Edit
from memplan.xla.module import Module
from memplan.xla.write import original

pytestmark = [
    pytest.mark.tpu_aot,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None, reason="needs the extra tpu-aot"
    ),
]
MIB = 2**20
S = jax.ShapeDtypeStruct
LAYERS, WIDTH, BATCH = 6, 1024, 32768
MLP = (
    [S((WIDTH, WIDTH), jnp.bfloat16)] * LAYERS,
    S((BATCH, WIDTH), jnp.bfloat16),
)
RESIDENT = 2 * (LAYERS * WIDTH * WIDTH + BATCH * WIDTH)


def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    for weight in weights:
        x = checkpoint_name(jnp.tanh(x @ weight), "activations")
    return jnp.mean((x * x).astype(jnp.float32))


def mlp(weights: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    value, gradients = jax.value_and_grad(loss)(weights, x)
    return [w - (0.1 * g).astype(w.dtype) for w, g in zip(weights, gradients, strict=True)], value


@functools.cache
def planned(budget: str | int, where: str = "") -> Outcome:
    """The step within a budget, its activations kept, recomputed, or on the host."""
    pin = {"activations": where} if where else None
    host_budget = "1GiB" if where == "host" else 0
    request = Request(device="v5e", budget=budget, host_budget=host_budget, pin=pin, split=False)
    return pipeline.best(mlp, MLP, {}, {"donate_argnums": 0}, request)


def test_the_unmodified_step_has_the_predicted_bytes() -> None:
    outcome = planned("1GiB")
    assert outcome.plan is None and outcome.fits
    assert outcome.device_bytes == pytest.approx(outcome.planned.predicted_bytes, rel=0.01)


@pytest.mark.parametrize("where", ["", "host"])
def test_less_than_the_unmodified_step_takes(where: str) -> None:
    outcome = planned("420MiB", where)
    assert outcome.fits and outcome.device_bytes <= 420 * MIB
    assert outcome.device_bytes == pytest.approx(outcome.planned.predicted_bytes, rel=0.03)
    assert (outcome.host_bytes > 0) is (where == "host")
    names = outcome.executable.module.instructions
    assert any(original(name) != name for name in names)  # XLA kept clones or copies


def test_a_refusal_names_a_budget_that_works() -> None:
    step = memplan.jit(
        mlp, device="v5e", budget="150MiB", host_budget=0, split=False, donate_argnums=0
    )
    with pytest.raises(InfeasibleBudgetError) as refused:
        step.plan(*MLP)
    assert planned(refused.value.smallest_bytes).fits


def test_residuals_of_a_scan_are_planned() -> None:
    def step(weights: jax.Array, x: jax.Array) -> Any:
        def total(weights: jax.Array) -> jax.Array:
            y, _ = jax.lax.scan(lambda y, w: (jnp.tanh(jnp.sin(y) @ w), None), x, weights)
            return y.astype(jnp.float32).sum()

        return weights - jax.grad(total)(weights)

    args = (S((8, WIDTH, WIDTH), jnp.bfloat16), MLP[1])
    plan = memplan.jit(step, device="v5e", budget="400MiB", donate_argnums=0).plan(*args)
    report = plan.report
    assert report.status == "fits" and report.compiled_peak_bytes <= 400 * MIB
    assert report.planner == "residuals"


def test_others_are_compared_within_the_same_limit() -> None:
    request = Request(device="v5e", budget="420MiB", split=False)
    options = {"donate_argnums": 0}
    rows = {row.name: row for row in compare(mlp, MLP, options, request, lambda *_: None).rows}
    assert rows["memplan"].fits and not rows["plain jax"].fits
    assert "XLA's rematerialization" in rows and not any(
        "offload" in name for name in rows if "XLA" in name
    )
    assert rows["jax.checkpoint, nothing saved"].device_bytes


def mutants(module: Module, count: int) -> list[tuple[Module, str]]:
    """Modules with one operand replaced by another value of its shape, which is not its copy."""
    draw = random.Random(0)
    ops = list(module.entry.ops.values())
    position = {op.name: number for number, op in enumerate(ops)}
    kernels = [op for op in ops if op.opcode == "fusion"]
    found: list[tuple[Module, str]] = []
    while len(found) < count:
        op = draw.choice(kernels)
        index = draw.randrange(len(op.operands))
        operand = module.entry.ops[op.operands[index]]
        others = [
            other.name
            for other in ops[: position[op.name]]
            if other.shape == operand.shape
            and base(module, other.name) != base(module, operand.name)
        ]
        if not others:
            continue
        name = draw.choice(others)
        changed = op.changed(operands=[*op.operands[:index], name, *op.operands[index + 1 :]])
        edit = Edit(module)
        entry = module.entry
        edit.replace(
            entry.with_ops([changed if other is op else other for other in entry.ops.values()])
        )
        found.append((edit.module, f"{op.name} reads {name} for {operand.name}"))
    return found


def base(module: Module, name: str) -> str:
    """The value that a chain of copies and clones holds."""
    op = module.entry.ops[name]
    while op.opcode in ("copy-done", "copy-start"):
        op = module.entry.ops[op.operands[0]]
    return original(op.name)


def test_the_judge_refuses_a_hundred_mutants() -> None:
    outcome = planned("420MiB", "host")
    plain, written = outcome.planned.plain.module, outcome.planned.result.module
    judge(plain, written)
    accepted = [what for mutant, what in mutants(written, 100) if is_accepted(plain, mutant)]
    assert accepted == []


def is_accepted(plain: Module, mutant: Module) -> bool:
    try:
        judge(plain, mutant)
    except NotThePlainModuleError:
        return False
    return True
