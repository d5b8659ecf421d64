"""What is called linear is: of half of its partial operands it makes half of its results."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from memplan.program import compat, ops
from memplan.program.flat import flatten
from memplan.program.interpret import interpret
from tests.program.ops.test_axis_rules import STEPS


def rule(eqn: compat.JaxprEqn, operands: list[Any]) -> list[Any]:
    results = compat.bind(eqn, operands)
    inexact = [np.issubdtype(np.asarray(x).dtype, np.floating) for x in operands]
    for partial in {tuple(inexact)} | {tuple(i == at for i in range(len(operands))) for at in range(len(operands))}:
        if not any(partial) or not all(b for a, b in zip(partial, inexact, strict=True) if a):
            continue
        if ops.of(eqn).linear(eqn, partial, [not one for one in partial]):
            halves = [x / 2 if one else x for x, one in zip(operands, partial, strict=True)]
            for whole, half in zip(results, compat.bind(eqn, halves), strict=True):
                np.testing.assert_allclose(2 * np.asarray(half), np.asarray(whole), rtol=1e-5)
    return results


@pytest.mark.parametrize("name", STEPS)
def test_what_is_linear_of_terms_is_a_term_of_the_result(name: str) -> None:
    function, args = STEPS[name]
    interpret(flatten(jax.make_jaxpr(function)(*args)), args, rule)
