"""What XLA compiles for eight GPUs that are not here: bytes as predicted, gathers that run again, woven sums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from memplan import parallel, pipeline
from memplan.compilation.callback import Callback, PlannedModule
from memplan.compilation.limits import Headroom, Limits
from memplan.compilation.scheduled import ScheduledModule
from memplan.compilation.shaping import collective_flags
from memplan.hardware.backend import GPU
from memplan.planning.registry import OWN
from memplan.program import compat
from memplan.request import Request
from memplan.xla.gpu.platform import described_devices
from memplan.xla.hook import intercept
from memplan.xla.module import Module
from tests.xla.collective_modules import A100, EIGHT
from tests.xla.steps import dense

pytestmark = pytest.mark.gpu_aot
BOTH, WHOLE = PartitionSpec(("data", "model")), PartitionSpec()
HIDES = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_latency_hiding_scheduler": True}
APART = collective_flags(EIGHT, GPU)
Step = Callable[[Any, jax.Array], Any]


def eight() -> Mesh:
    return Mesh(np.array(described_devices(A100, 2, 4)).reshape(2, 4), ("data", "model"))


def chain(weights: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    def loss(weights: list[jax.Array]) -> jax.Array:
        h = x
        for weight in weights:
            h = jnp.tanh(h @ weight)
        return (h**2).mean()

    value, gradients = jax.value_and_grad(loss)(weights)
    return [
        weight - 0.1 * gradient for weight, gradient in zip(weights, gradients, strict=True)
    ], value


def scanned(weights: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    def loss(weights: jax.Array) -> jax.Array:
        h, _ = jax.lax.scan(lambda h, weight: (jnp.tanh(h @ weight), None), x, weights)
        return (h**2).mean()

    value, gradient = jax.value_and_grad(loss)(weights)
    return weights - 0.1 * gradient, value


def by_hand(weights: list[jax.Array], x: jax.Array) -> list[jax.Array]:
    """Data parallel; gradients summed within hosts, between them, and gathered."""

    def local(weights: list[jax.Array], x: jax.Array) -> list[jax.Array]:
        def total(gradient: jax.Array) -> jax.Array:
            part = jax.lax.psum(jax.lax.psum_scatter(gradient, "model", tiled=True), "data")
            return jax.lax.all_gather(part, "model", tiled=True)

        gradients = jax.grad(lambda weights: chain(weights, x)[1])(weights)
        return [
            weight - 0.1 * total(gradient)
            for weight, gradient in zip(weights, gradients, strict=True)
        ]

    return jax.shard_map(
        local, mesh=eight(), in_specs=(WHOLE, BOTH), out_specs=WHOLE, check_vma=False
    )(weights, x)


def array(*dims: int, spec: PartitionSpec = WHOLE) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, jnp.float32, sharding=NamedSharding(eight(), spec))


def tensors() -> list[jax.ShapeDtypeStruct]:
    return [
        array(256, 256, spec=PartitionSpec(*("model" if at == n % 2 else None for at in (1, 0))))
        for n in range(2)
    ]


STEPS: dict[str, Callable[[], tuple[Step, Any, jax.ShapeDtypeStruct]]] = {
    "data": lambda: (chain, [array(256, 256)] * 3, array(1024, 256, spec=BOTH)),
    "fsdp": lambda: (chain, [array(256, 256, spec=BOTH)] * 3, array(1024, 256, spec=BOTH)),
    "tensor": lambda: (chain, tensors(), array(1024, 256, spec=PartitionSpec("data"))),
    "scanned data": lambda: (scanned, array(4, 256, 256), array(1024, 256, spec=BOTH)),
    "scanned fsdp": lambda: (
        scanned,
        array(4, 256, 256, spec=PartitionSpec(None, *BOTH)),
        array(1024, 256, spec=BOTH),
    ),
}
# Every step, and both ways of compiling collectives with and without a loop.
QUICKEST = {
    ("data", False),
    ("fsdp", True),
    ("tensor", False),
    ("scanned data", True),
    ("scanned fsdp", False),
}


def compiled(step: Step, weights: Any, x: jax.ShapeDtypeStruct, rewrite: Any, **flags: Any) -> int:
    """Device bytes of the step, compiled with a rewrite."""
    weight_shardings = jax.tree.map(lambda weight: weight.sharding, weights)
    shardings = None if step is by_hand else (weight_shardings, array().sharding)
    name = f"jit_{step.__name__}"  # pyright: ignore[reportFunctionMemberAccess]
    with intercept(name, rewrite, "cuda") as interception, compat.without_compilation_cache():
        lowered = jax.jit(step, donate_argnums=0, out_shardings=shardings).lower(weights, x)
        memory = lowered.compile(compiler_options={**HIDES, **flags}).memory_analysis()
    interception.check()
    assert memory is not None
    own = memory.temp_size_in_bytes + memory.argument_size_in_bytes
    return own + memory.output_size_in_bytes - memory.alias_size_in_bytes


@pytest.mark.parametrize(
    ("name", "apart"),
    [
        pytest.param(name, apart, marks=[] if (name, apart) in QUICKEST else [pytest.mark.slow])
        for name in STEPS
        for apart in (False, True)
    ],
)
def test_bytes_are_those_that_were_predicted(name: str, apart: bool) -> None:
    modules: list[Module] = []

    def read(module: Module) -> None:
        modules.append(module)

    nbytes = compiled(*STEPS[name](), read, **(APART if apart else {}))
    assert ScheduledModule(modules[-1], A100, EIGHT).device_bytes == pytest.approx(nbytes, rel=1e-3)


@dataclass(frozen=True)
class Planned:
    """A step planned for a share of its bytes: as XLA scheduled it, what was made of it, and the bytes it takes."""

    before: ScheduledModule
    found: PlannedModule
    nbytes: int


def planned(
    step: Step, weights: Any, x: jax.ShapeDtypeStruct, share: float, **flags: Any
) -> Planned:
    read: list[ScheduledModule] = []
    calls: list[Callback] = []

    def rewrite(module: Module) -> Module | None:
        read.append(ScheduledModule(module, A100, EIGHT))
        limits = Limits(int(share * read[-1].device_bytes), 0)
        calls.append(
            Callback(
                A100, limits, Headroom(), EIGHT, OWN, None, lambda fingerprint, key, make: make()
            )
        )
        return calls[-1](module)

    jax.clear_caches()
    nbytes = compiled(step, weights, x, rewrite, **flags)
    return Planned(read[-1], calls[-1].planned, nbytes)


def gathers(module: Module) -> int:
    return sum(op.opcode == "all-gather-start" for op in module.entry.ops.values())


@pytest.mark.parametrize(
    ("layers", "share", "again"),
    [(4, 0.6, False), (7, 0.36, True), pytest.param(8, 0.33, True, marks=pytest.mark.slow)],
)
def test_a_budget_is_kept_by_another_order_and_by_gathering_again(
    layers: int, share: float, again: bool
) -> None:
    """Layers whose gathered weights are most of what the step holds."""
    weights, x = [array(1024, 1024, spec=BOTH)] * layers, array(512, 1024, spec=BOTH)
    outcome = planned(chain, weights, x, share, **APART)
    assert outcome.found.fits
    before, after = outcome.before.module, outcome.found.result.module
    assert (gathers(before) < gathers(after)) if again else (gathers(before) == gathers(after))
    assert outcome.nbytes == pytest.approx(outcome.found.predicted_bytes, rel=1e-3)


def adam(state: Any, x: jax.Array) -> Any:
    """Like `chain`, with an optimizer that counts its steps."""
    weights, moments, count = state
    value, gradients = jax.value_and_grad(lambda weights: chain(weights, x)[1])(weights)
    moments = [
        0.9 * moment + 0.1 * gradient for moment, gradient in zip(moments, gradients, strict=True)
    ]
    rate = 0.1 / (1 - 0.9**count)
    return (
        [weight - rate * moment for weight, moment in zip(weights, moments, strict=True)],
        moments,
        count + 1,
    ), value


def test_updates_free_their_gradients_before_the_last_sum() -> None:
    """Eight layers whose gradients, weights whole on each device, are more than a budget leaves."""
    weights = [array(2048, 2048)] * 8  # XLA sums less than 30 MiB together
    outcome = planned(
        adam, (weights, weights, array()), array(2048, 2048, spec=BOTH), 0.85, **APART
    )
    assert outcome.found.fits
    assert outcome.nbytes == pytest.approx(outcome.found.predicted_bytes, rel=1e-3)


def test_woven_sums_take_the_bytes_that_were_predicted() -> None:
    outcome = planned(by_hand, [array(4096, 4096)] * 6, array(16384, 4096, spec=BOTH), 1.0, **APART)
    woven = outcome.found.result.replay
    assert woven.step_s < outcome.before.replay.step_s
    assert woven.hidden_collective_s > outcome.before.replay.hidden_collective_s
    assert outcome.nbytes == pytest.approx(outcome.found.predicted_bytes, rel=1e-3)
    assert outcome.nbytes <= outcome.before.device_bytes


@pytest.mark.slow
def test_a_step_over_a_mesh_fits_its_budget() -> None:
    """Collectives of a planned module are those of the plain one, asynchronous as there."""
    step, (state, _) = dense(256, 6)
    args = state, jax.ShapeDtypeStruct((16384, 256), jnp.float32)
    divided = parallel.data_parallel(step, AbstractMesh((2, 4), ("host", "device")))
    options = {"donate_argnums": 0}
    plain = pipeline.best(divided, args, {}, options, Request(device="v100"))
    request = Request(int(0.7 * plain.device_bytes), device="v100")
    outcome = pipeline.best(divided, args, {}, options, request)
    assert outcome.fits and outcome.planned is not None and outcome.planned.plan is not None
    assert outcome.device_bytes <= 0.7 * plain.device_bytes
