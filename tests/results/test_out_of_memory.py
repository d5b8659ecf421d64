"""memplan's out-of-memory error: the block, the pool, the state, and advice."""

from types import SimpleNamespace
from typing import Any

import pytest

from memplan.errors import MemplanError
from memplan.results.infeasible import no_block, out_of_memory
from memplan.xla import local

ROOM = local.Room(
    in_use_bytes=128 << 20, peak_bytes=0, limit_bytes=1762 << 20, block_bytes=850 << 20
)
ON_DEVICE = (  # as jaxlib 0.11.2 and 0.12.0.1 say it
    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 900.02MiB with allocator GPU_0_bfc "
    "on device 0. [tf-allocator-allocation-error=''] [executable_name='memplan_0_jit_step']"
)
PINNED = (
    "RESOURCE_EXHAUSTED: Out of host memory while trying to allocate 1.75GiB with allocator "
    "xla_gpu_host_bfc on device 0. Please set the environment variable "
    "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB to allocate larger host memory than the default 64 GB. "
    "[executable_name='memplan_1_jit_step'] [tf-allocator-allocation-error='']"
)


def leaves(*deleted: bool) -> list[Any]:
    return [
        SimpleNamespace(is_deleted=lambda is_deleted=is_deleted: is_deleted)
        for is_deleted in deleted
    ]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "room", lambda: ROOM)
    monkeypatch.setattr(local, "pools", lambda: local.Pools(preallocates=False))


def test_before_the_step() -> None:
    error = no_block(900 << 20, ROOM)
    assert isinstance(error, MemplanError) and isinstance(error, MemoryError)
    assert (error.needed_bytes, error.free_bytes) == (900 << 20, 850 << 20)
    words = "not started", "900.0 MiB", "850.0 MiB", "128.0 MiB of 1762.0 MiB"
    assert all(word in str(error) for word in words)
    assert "export XLA_PYTHON_CLIENT_PREALLOCATE=true" in str(error)


STATES = [
    (leaves(False, False), "its arguments are unchanged"),
    (leaves(True, True, False), "2 of its 3 donated"),
]


@pytest.mark.parametrize(("donated", "words"), STATES)
def test_the_error_describes_the_state(donated: list[Any], words: str) -> None:
    error = out_of_memory(RuntimeError(ON_DEVICE), donated)
    assert words in str(error) and "900.0 MiB" in str(error)
    assert error.free_bytes == ROOM.block_bytes


def test_a_pool_that_is_one_region_is_not_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "pools", local.Pools)
    assert "PREALLOCATE" not in str(no_block(1, ROOM))


def test_another_allocator_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "room", lambda: None)
    error = out_of_memory(RuntimeError(ON_DEVICE), [])
    assert error.free_bytes is None
    assert (
        "and Out of memory while trying to allocate 900.02MiB with allocator GPU_0_bfc on device 0.;"
        in str(error)
    )


def test_the_pinned_pool_names_the_line_that_raises_it() -> None:
    error = out_of_memory(RuntimeError(PINNED), leaves(True))
    assert error.needed_bytes == 7 << 28
    assert "64.0 GiB" in str(error) and "export XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=65" in str(error)


def test_other_errors_are_left_alone() -> None:
    assert out_of_memory(RuntimeError("INTERNAL: cuDNN does not like it"), []) is None
