"""The doctor finds each planted fault with its bytes by jax, and nothing in healthy steps."""

import inspect
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import memplan
from memplan import api
from memplan.hardware import catalog
from memplan.program.lowerable import Lowerable
from memplan.report.diagnosis import Diagnosis, Finding
from memplan.xla.target import Target
from tests import vocabulary
from tests.studies import patients
from tests.studies.patients import (
    LAYERS,
    ROWS,
    WIDE,
    WIDTH,
    WORDS,
    Patient,
    Step,
    X,
    array,
    weights,
)
from tests.xla.steps import scanned

MIB = 2**20


def device_bytes(
    step: Step, args: Sequence[Any], donated: tuple[int, ...], device: str | None
) -> int:
    """Device bytes by XLA, without memplan's hook."""
    if device is None:
        compiled = jax.jit(step, donate_argnums=donated).lower(*args).compile()
    else:
        lowerable = Lowerable(step, args, {}, {"donate_argnums": donated})
        compiled = Target(catalog.named(device), described=True).compile(lowerable).compiled
    stats = compiled.memory_analysis()
    parts = stats.temp_size_in_bytes + stats.argument_size_in_bytes + stats.output_size_in_bytes
    return parts - stats.alias_size_in_bytes


def only(kind: str, diagnosis: Diagnosis) -> Finding:
    (finding,) = (finding for finding in diagnosis.findings if finding.kind == kind)
    return finding


def line_of(mark: str) -> str:
    lines = inspect.getsource(patients).splitlines()
    (number,) = (number for number, line in enumerate(lines, 1) if line.endswith(f"# {mark}"))
    return f"patients.py:{number}"


MOMENTUM = weights(), weights(), X, X
WITH_HEAD = weights(), array(WIDTH, WORDS), X, X
COMPILED = {
    "the state is not donated": Patient("donate", *(patients.train, (weights(), X, X)) * 2, ()),
    "the optimizer's state is not donated": Patient(
        "donate", *(patients.with_momentum, MOMENTUM) * 2, (0,), (0, 1)
    ),
    "logits are returned": Patient(
        "output",
        patients.with_logits,
        WITH_HEAD,
        patients.without_logits,
        WITH_HEAD,
        mark="the logits",
    ),
}


@pytest.mark.parametrize("patient", COMPILED.values(), ids=COMPILED)
def test_a_fault_is_found_with_the_bytes_of_both_steps(patient: Patient) -> None:
    check_finding(patient, None)


def check_finding(patient: Patient, device: str | None) -> None:
    diagnosis = api.doctor(
        patient.step, patient.args, donate_argnums=patient.donated, device=device
    )
    (finding,) = diagnosis.findings
    sick = device_bytes(patient.step, patient.args, patient.donated, device)
    cured = device_bytes(patient.cured, patient.cured_args, patient.cured_donated, device)
    assert diagnosis.device_bytes == sick and sick - cured > MIB
    assert finding.kind == patient.kind and finding.measured == "compiled"
    assert finding.gained_bytes == pytest.approx(sick - cured, rel=0.02)
    assert finding.device_bytes == diagnosis.device_bytes - finding.gained_bytes
    assert finding.added_s is not None and diagnosis.compilations == 2
    assert finding.source.endswith(line_of(patient.mark) if patient.mark else "")
    healthy = api.doctor(
        patient.cured, patient.cured_args, donate_argnums=patient.cured_donated, device=device
    )
    assert healthy.is_healthy and healthy.compilations == 1


def test_types_of_64_bits_are_found() -> None:
    with jax.enable_x64(True):
        args = weights(dtype=jnp.float64), WIDE, WIDE
        diagnosis = api.doctor(patients.train, args, donate_argnums=0)
        sick = device_bytes(patients.train, args, (0,), None)
    cured = device_bytes(patients.train, (weights(), X, X), (0,), None)
    finding = only("x64", diagnosis)
    assert finding.measured == "compiled" and finding.gained_bytes == pytest.approx(
        sick - cured, rel=0.02
    )
    assert finding.source.endswith(line_of("a layer"))


def test_types_of_64_bits_that_the_step_requests_stay_counted() -> None:
    with jax.enable_x64(True):
        shift = np.ones((1, WIDTH))

        def step(params: Any, x: jax.Array) -> Any:
            return patients.train(params, x.astype(jnp.float64) + shift, x)

        finding = only(
            "x64", api.doctor(step, (weights(dtype=jnp.float64), WIDE), donate_argnums=0)
        )
        sick = device_bytes(step, (weights(dtype=jnp.float64), WIDE), (0,), None)
    assert finding.measured == "counted" and finding.gained_bytes == pytest.approx(
        sick / 2, rel=0.02
    )


@pytest.mark.parametrize(
    ("kind", "step", "args", "nbytes", "mark"),
    [
        (
            "closed over",
            patients.closing_over_a_table,
            (weights(), X),
            patients.TABLE.nbytes,
            "the loss",
        ),
        ("closed over", patients.closing_over_weights, (X,), LAYERS * WIDTH * WIDTH * 4, "a layer"),
        ("folded", patients.folding, (weights(), X), (ROWS - 8) * WIDTH * 4, "what is folded"),
        ("table", patients.one_hot_rows, (array(WIDTH, WIDTH), X), ROWS * WIDTH * 4, "the rows"),
    ],
)
def test_arrays_in_the_program_are_counted(
    kind: str, step: Step, args: Sequence[Any], nbytes: int, mark: str
) -> None:
    donated = (0,) if step in (patients.closing_over_a_table, patients.one_hot_rows) else ()
    diagnosis = api.doctor(step, args, donate_argnums=donated)
    (finding,) = diagnosis.findings
    assert (finding.kind, finding.gained_bytes, finding.measured) == (kind, nbytes, "counted")
    assert finding.source.endswith(line_of(mark)) and diagnosis.compilations == 1
    assert finding.device_bytes == diagnosis.device_bytes - (nbytes if kind == "table" else 0)
    report = memplan.jit(step, donate_argnums=donated).plan(*args).report
    assert report.findings == diagnosis.findings and str(report).startswith("What to do first")


@pytest.mark.slow
@pytest.mark.gpu_aot
def test_state_that_the_host_could_hold_is_found() -> None:
    x = array(128, WIDTH)
    args = (weights(), weights()), x, x
    options = {"device": "a100", "donate_argnums": 0, "split": False}
    budget = int(0.8 * device_bytes(patients.with_state, args, (0,), "a100"))
    diagnosis = api.doctor(patients.with_state, args, budget=budget, **options)
    finding = only("host state", diagnosis)
    planned = (
        memplan.jit(patients.with_state, budget=budget, host_state=0, **options).plan(*args).report
    )
    assert finding.device_bytes == planned.compiled_peak_bytes <= budget
    assert finding.gained_bytes == diagnosis.device_bytes - planned.compiled_peak_bytes
    assert finding.host_bytes == 2 * LAYERS * WIDTH * WIDTH * 4 and (finding.added_s or 0.0) > 0.0


def test_a_batch_that_just_misses_is_found_and_then_the_plan() -> None:
    def bytes_of(rows: int) -> int:
        return device_bytes(
            patients.train, (weights(), array(rows, WIDTH), array(rows, WIDTH)), (0,), None
        )

    budget = bytes_of(700)
    diagnosis = api.doctor(
        patients.train, (weights(), X, X), budget=budget, split=False, donate_argnums=0
    )
    batch, plan = diagnosis.findings
    assert not diagnosis.fits and diagnosis.device_bytes == bytes_of(ROWS) > budget
    rows = int(batch.advice.partition("a batch of ")[2].partition(" ")[0])
    assert rows <= 700 < rows + ROWS // 32 and batch.device_bytes == bytes_of(rows) <= budget
    assert (
        f"{rows + ROWS // 32} do not fit" in batch.advice and bytes_of(rows + ROWS // 32) > budget
    )
    assert (batch.added_s or 0.0) < 0.0
    assert plan.kind == "plan"
    step = memplan.jit(patients.train, budget=plan.device_bytes, split=False, donate_argnums=0)
    assert step.plan(weights(), X, X).report.compiled_peak_bytes == plan.device_bytes


def test_a_kernel_above_the_budget_needs_slabs() -> None:
    args = vocabulary.shapes()
    diagnosis = api.doctor(vocabulary.step, args, budget=vocabulary.IN_SLABS, donate_argnums=0)
    (finding,) = diagnosis.findings
    assert finding.kind == "slabs" and "vocabulary.py:" in finding.advice
    planned = (
        memplan.jit(vocabulary.step, budget=vocabulary.IN_SLABS, donate_argnums=0)
        .plan(*args)
        .report
    )
    assert finding.device_bytes == planned.compiled_peak_bytes
    assert (
        finding.gained_bytes
        == device_bytes(vocabulary.step, args, (0,), None) - finding.device_bytes
    )


def test_if_no_plan_fits_the_smallest_is_listed() -> None:
    diagnosis = api.doctor(
        patients.train, (weights(), X, X), budget="1MiB", split=False, donate_argnums=0
    )
    (finding,) = diagnosis.findings
    assert "no plan fits" in finding.advice and MIB < finding.device_bytes < diagnosis.device_bytes


HEALTHY: dict[str, tuple[Step, Sequence[Any], dict[str, Any]]] = {
    "donated": (patients.train, (weights(), X, X), {"donate_argnums": 0}),
    "donated by its own jit": (jax.jit(patients.train, donate_argnums=0), (weights(), X, X), {}),
    "both states donated": (patients.with_momentum, MOMENTUM, {"donate_argnums": (0, 1)}),
    "a scan": (*scanned(256, 4), {"donate_argnums": 0}),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_steps_have_no_findings(name: str) -> None:
    step, args, options = HEALTHY[name]
    diagnosis = api.doctor(step, args, **options)
    assert (
        diagnosis.is_healthy and not diagnosis.findings and "What to do first" not in str(diagnosis)
    )


def test_progress_names_each_compilation() -> None:
    stages: list[str] = []
    with api.progress(lambda stage, share: stages.append(stage)):
        api.doctor(patients.train, (weights(), X, X))
    assert "compiling the step as it is" in stages and "compiling with argument 0 donated" in stages
