"""A step in XLA's pools, and the environment variables that it needs."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from memplan.compilation.outcome import Outcome
from memplan.planning.transforms import StateOnHost
from memplan.program.trace import WithStateOnHost, trace
from memplan.results.report import pooled
from memplan.xla.local import Pools, Taken
from memplan.xla.target import Executable, Memory, Target
from tests.compilation.modules import V100
from tests.compilation.outcomes import outcome

MIB, GIB = 1 << 20, 1 << 30
X = jax.ShapeDtypeStruct((256, MIB), jnp.float32)  # 1 GiB
DEVICE = replace(V100, memory_bytes=16 * GIB)


def compiled(
    temp_bytes: int, host_bytes: int = 0, host_inputs: int = 0, described: bool = True
) -> Outcome:
    """A step of eight arguments of 1 GiB, some of them on the host."""
    program = trace(lambda *arrays: arrays, [X] * 8, {}, {"donate_argnums": tuple(range(8))})
    on_host = frozenset(range(host_inputs))
    program = program.transformed(
        WithStateOnHost(StateOnHost(tuple(sorted(on_host))), on_host), None
    )
    resident = (8 - host_inputs) * GIB
    memory = Memory(resident + temp_bytes, host_bytes, temp_bytes, resident)
    step = outcome(program, 0)
    return replace(step, executable=Executable(None, memory), target=Target(DEVICE, described))


def test_the_default_pools() -> None:
    figures = pooled(compiled(2 * GIB, host_bytes=5 * GIB, host_inputs=4), Pools())
    assert figures.device == Taken(6 * GIB, 12 * GIB)
    assert figures.host == Taken(5 * GIB, 8 * GIB)  # regions of 1, 1, 2 and 4 GiB
    assert not figures.exports


def test_constants_are_not_in_the_pool() -> None:
    step = compiled(2 * GIB)
    memory = step.executable.memory
    more = replace(memory, device_bytes=memory.device_bytes + GIB, constant_bytes=GIB)
    closed = replace(step, executable=replace(step.executable, memory=more))
    assert pooled(closed, Pools()).device == pooled(step, Pools()).device


def test_a_larger_share_of_the_device() -> None:
    assert pooled(compiled(5 * GIB), Pools()).exports == ("export XLA_CLIENT_MEM_FRACTION=0.82",)
    assert not pooled(compiled(5 * GIB), Pools(fraction=0.9)).exports
    # a local GPU's memory is the part that jax may use
    assert not pooled(compiled(5 * GIB, described=False), Pools()).exports
    assert pooled(compiled(9 * GIB, described=False), Pools()).exports == (
        "export XLA_CLIENT_MEM_FRACTION=0.80",
    )
    assert not pooled(compiled(9 * GIB), Pools()).exports  # more than the card has


def test_one_region_instead_of_several() -> None:
    growing = Pools(preallocates=False)
    # Regions of 1, 1, 2 and 4 GiB, then the remaining 4.
    figures = pooled(compiled(int(3.9 * GIB)), growing)
    assert figures.device == Taken(12 * GIB, 12 * GIB) and not figures.exports
    # 8 GiB are in regions, and 4 remain.
    figures = pooled(compiled(int(6.5 * GIB), host_inputs=3), growing)
    assert figures.exports == ("export XLA_PYTHON_CLIENT_PREALLOCATE=true",)
    assert not pooled(compiled(int(6.5 * GIB), host_inputs=3), Pools()).exports
    assert pooled(compiled(GIB), Pools(of_bfc=False)).device is None


def test_a_larger_pinned_pool() -> None:
    assert pooled(compiled(0, host_bytes=70 * GIB), Pools()).exports == (
        "export XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=70",
    )
    # 8 GiB in regions of 1, 1, 2 and 4; a block of 57 GiB does not fit the remaining 56
    figures = pooled(
        compiled(0, host_bytes=65 * GIB, host_inputs=8), Pools(host_limit_bytes=64 * GIB)
    )
    assert figures.host.refused_nbytes == 57 * GIB
    assert figures.exports == ("export XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=65",)
    assert not pooled(compiled(0, host_bytes=65 * GIB), Pools(host_limit_bytes=65 * GIB)).exports
