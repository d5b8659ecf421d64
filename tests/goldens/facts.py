"""What the goldens hold of a case: facts that do not depend on how modules are represented."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from memplan.errors import MemplanError
from memplan.planning.problem import Problem
from memplan.program import compat
from memplan.xla.sources import Sources
from tests.goldens.planned import Case, plan_module, scheduled_module, shape_module
from tests.goldens.printed import digest_of, nameless_digest_of

# Digests of the module's text, and what a plan says of the release that made it.
_CHANGING = ("fingerprint", "structure", "kernels", "program", "format", "length")
BETWEEN_HOSTS = (None, "bfloat16", "float16")


def nine_digits(value: float) -> float:
    return float(f"{value:.9g}")


def plan_facts(case: Case, share: str) -> Mapping[str, Any]:
    """The plan for a budget, its prediction, digests of problem and written module; or an error."""
    assert case.budgets is not None
    try:
        planned = plan_module(case, case.budgets[share])
    except MemplanError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    outcome = planned.module
    problem = outcome.base.timed_problem
    document = None
    if outcome.plan is not None:
        document = json.loads(outcome.plan.to_json())
        document = {name: value for name, value in document.items() if name not in _CHANGING}
        document["actions"] = [f"{kind} {name}" for kind, name in document["actions"]]
    return {
        "plan": document,
        "fits": outcome.fits,
        "device_bytes": outcome.predicted_bytes,
        "host_bytes": outcome.predicted_host_bytes,
        "step_s": nine_digits(outcome.result.replay.step_s),
        "bound_s": nine_digits(outcome.bound_s),
        "kernels": len(problem.kernels),
        "buffers": len(problem.buffers),
        "problem": problem_digest(problem),
        "written": digest_of(compat.module_text(planned.proto)),
    }


def module_facts(case: Case) -> Mapping[str, Any]:
    """The problem of the module as it is, and each kernel's seconds, source line and scope."""
    plain = scheduled_module(case)
    problem, replay = plain.timed_problem, plain.replay
    sources = Sources(plain.module)
    seconds = {**replay.seconds, **replay.blocks}
    return {
        "printed": digest_of(compat.module_text(case.proto)),
        "device_bytes": plain.device_bytes,
        "resident_bytes": plain.resident_bytes,
        "kernels": len(problem.kernels),
        "buffers": len(problem.buffers),
        "problem": problem_digest(problem),
        "step_s": nine_digits(replay.step_s),
        "compute_s": nine_digits(replay.compute_s),
        "flops": nine_digits(replay.flops),
        "collective_s": nine_digits(replay.collective_s),
        "by_kernel": {
            kernel.name: [
                nine_digits(seconds.get(kernel.name, 0.0)),
                PurePath(sources.line(kernel.name)).name,
                sources.scope(kernel.name),
            ]
            for kernel in problem.kernels
        },
    }


def shaping_facts(case: Case) -> Mapping[str, Any]:
    """Digests of the shaped module, by the type in which sums travel between hosts."""
    shaped = {str(dtype): shape_module(case, dtype) for dtype in BETWEEN_HOSTS}
    return {
        dtype: None if proto is None else nameless_digest_of(compat.module_text(proto))
        for dtype, proto in shaped.items()
    }


def problem_digest(problem: Problem) -> str:
    """Of everything in a problem, by names."""
    return hashlib.sha256(json.dumps(_problem(problem)).encode()).hexdigest()[:32]


def _problem(problem: Problem) -> Any:
    buffers, kernels = problem.buffers, problem.kernels

    def named(numbers: Any) -> list[str]:
        return [buffers[number].name for number in numbers]

    def aliases(pairs: Mapping[int, tuple[int, ...]]) -> list[Any]:
        return sorted([buffers[result].name, named(inputs)] for result, inputs in pairs.items())

    def kernel(number: int | None) -> str | None:
        return None if number is None else kernels[number].name

    return {
        "buffers": [
            [
                buffer.name,
                buffer.nbytes,
                buffer.role.value,
                kernel(buffer.maker),
                buffers[buffer.alias_set].name,
                None if buffer.pin is None else [buffer.pin.name, buffer.pin.where.value],
            ]
            for buffer in buffers
        ],
        "kernels": [
            [
                problem_kernel.name,
                named(problem_kernel.reads),
                named(problem_kernel.writes),
                aliases(problem_kernel.may_alias),
                aliases(problem_kernel.may_alias_elements),
                nine_digits(problem_kernel.seconds),
                kernel(problem_kernel.block),
                problem_kernel.recomputable,
                problem_kernel.trips,
                kernel(problem_kernel.started_by),
                problem_kernel.is_boundary,
            ]
            for problem_kernel in kernels
        ],
        "outputs": named(problem.outputs),
        "donated": sorted(named(problem.donated)),
        "tables_nbytes": problem.tables_nbytes,
        "alignment": problem.alignment,
    }
