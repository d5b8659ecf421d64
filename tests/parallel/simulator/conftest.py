"""A kernel that is missing is an error, where a test asks for that."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parallel.simulator import kernels


@pytest.fixture
def without_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel may be missing."""

    def missing(eqn: Any, operands: Any) -> Any:
        raise AssertionError(f"no kernel for {eqn.primitive.name}")

    monkeypatch.setattr(kernels, "by_jax", missing)
