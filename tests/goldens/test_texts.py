"""Equations of transformed steps, reports and errors are as they were (`texts.py`)."""

import jax
import pytest

from tests.goldens.texts import ON_GPUS, RELEASE, SLOW, TEXTS, path

# Another release prints jaxprs in another way, and XLA compiles to other kernels.
pytestmark = pytest.mark.skipif(jax.__version__ != RELEASE, reason=f"stored by jax {RELEASE}")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[pytest.mark.gpu_aot] * (name in ON_GPUS) + [pytest.mark.slow] * (name in SLOW),
        )
        for name in TEXTS
    ],
)
def test_text(name: str) -> None:
    assert TEXTS[name]() == path(name).read_text()
