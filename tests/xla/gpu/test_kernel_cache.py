import jax
import jax.numpy as jnp
import pytest

from memplan.hardware import catalog
from memplan.hardware.device import Device, GpuTarget
from memplan.program.lowerable import Lowerable
from memplan.xla.gpu import described
from memplan.xla.gpu.described import kernel_cache_file
from memplan.xla.target import Executable, Target

P100, V100 = catalog.named("p100"), catalog.named("v100")


def test_each_gpu_has_a_file_of_its_own() -> None:
    assert P100.target and V100.target
    assert (
        kernel_cache_file(P100.target)
        == kernel_cache_file(P100.target)
        != kernel_cache_file(V100.target)
    )


def test_a_file_that_has_grown_large_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = kernel_cache_file(GpuTarget((7, 0), 1, 1, 1, 1, 1, 1.0))
    kept.write_bytes(bytes(8))
    assert kernel_cache_file(GpuTarget((7, 0), 1, 1, 1, 1, 1, 1.0)).exists()
    monkeypatch.setattr(described, "_MOST_BYTES", 7)
    assert not kernel_cache_file(GpuTarget((7, 0), 1, 1, 1, 1, 1, 1.0)).exists()


@pytest.mark.gpu_aot
def test_a_kernel_is_made_once() -> None:
    def compiled(device: Device, factor: float) -> Executable:
        def step(x: jax.Array) -> tuple[jax.Array, jax.Array]:
            return jnp.tanh(x @ x).sum(0), jnp.cumsum(factor * x, axis=1)

        shape = jax.ShapeDtypeStruct((96, 96), jnp.float32)
        return Target(device, described=True).compile(Lowerable(step, (shape,)))

    assert V100.target
    kept = kernel_cache_file(V100.target)
    first = compiled(V100, 3.0)
    contents = kept.read_bytes()
    again = compiled(V100, 3.0)
    assert len(kept.read_bytes()) == len(contents)
    assert again.memory == first.memory
    compiled(P100, 3.0)
    assert len(kept.read_bytes()) == len(contents)
    compiled(V100, 5.0)
    assert len(kept.read_bytes()) > len(contents)
