"""Compilations without memplan: each policy makes another program, and XLA gets the budget."""

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import pytest

from memplan.hardware import catalog
from memplan.hardware.backend import CPU, GPU, Backend
from memplan.hardware.device import Device
from memplan.program.lowerable import Lowerable
from memplan.studies.baselines import Baseline, Baselines, policies, refusal
from memplan.xla.gpu.platform import GpuPlatform
from memplan.xla.replay import replay
from memplan.xla.target import Memory, Target
from tests.dense import step
from tests.hlo import read_module
from tests.xla.small_modules import ADD, chain, module

V100 = catalog.named("v100")
TEXT = module(chain(3, "v") + "\nROOT %end = f32[512,1024]{1,0} negate(%v2)", ADD)
ARGS = ([jnp.ones((4, 4))] * 3, jnp.ones((8, 4)))


@dataclass
class Fake:
    """A target that compiles everything into one text, and records jaxprs and flags."""

    device: Device = V100
    text: str = TEXT
    compilations: list[tuple[str, Any]] = field(default_factory=list)
    backend: Backend = GPU

    rematerializes_above = Target.rematerializes_above
    platform = GpuPlatform()

    def mesh_for(self, spmd: object) -> None:
        return None

    def compile(self, lowerable: Lowerable, flags: Any, rewrite: Any, *_: Any) -> Any:
        self.compilations.append((str(jax.make_jaxpr(lowerable.step)(*lowerable.args)), flags))
        module = read_module(self.text)
        if rewrite is not None:
            rewrite(module)
        return SimpleNamespace(module=module, memory=Memory(100, 7, 30))


@pytest.fixture
def target() -> Fake:
    return Fake()


@pytest.fixture
def without_memplan(target: Fake) -> Baselines:
    return Baselines(step, ARGS, {}, cast(Any, target))


def test_bytes_are_the_compilers_and_seconds_the_replays(without_memplan: Baselines) -> None:
    assert without_memplan.plain() == Baseline(100, 7, replay(read_module(TEXT), V100).step_s, 70)


def test_policies_change_the_program_and_not_the_step(
    without_memplan: Baselines, target: Fake
) -> None:
    without_memplan.plain()
    for policy in policies().values():
        without_memplan.checkpoint(policy)
    without_memplan.plain()
    (plain, *checkpointed, last), flags = zip(*target.compilations, strict=True)
    assert plain == last and "remat" not in plain and "checkpoint" not in plain
    assert plain not in checkpointed and len(set(checkpointed)) >= 3
    for policy, jaxpr in zip(policies().values(), checkpointed, strict=True):
        assert repr(policy).partition(" at 0x")[0] in " ".join(jaxpr.split())  # jax releases differ
    assert not any(flags)


ON_HOST = TEXT.replace(
    "ROOT %end = f32[512,1024]{1,0} neg", "ROOT %end = f32[512,1024]{1,0:S(5)} neg"
)

HOLDING = TEXT.replace("negate(%v2)", "add(%v2, %v0)")  # temporaries


@pytest.mark.parametrize(
    ("target", "is_compiled"),
    [
        (Fake(), False),
        (Fake(replace(V100, memory_bytes=2**20), text=HOLDING), True),
        (Fake(text=HOLDING), False),
        (Fake(text=ON_HOST), True),
        (Fake(backend=CPU), True),
    ],
    ids=["schedule", "rematerialized", "in memory", "on the host", "cpu"],
)
def test_a_policy_is_compiled_where_its_schedule_does_not_tell(
    target: Fake, is_compiled: bool
) -> None:
    without_memplan = Baselines(step, ARGS, {}, cast(Any, target))
    baseline = without_memplan.checkpoint(jax.checkpoint_policies.nothing_saveable)
    assert baseline.is_compiled is is_compiled
    assert (baseline.device_bytes == 100) is is_compiled
    assert baseline.step_s == replay(read_module(target.text), target.device).step_s


def test_xla_gets_the_budget_and_more_flags(
    without_memplan: Baselines, target: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[tuple[int, int]] = []
    limited = replace(target, device=replace(V100, memory_bytes=1))

    def limit(target: Any, budget: int, resident: int) -> Any:
        limits.append((budget, resident))
        return limited, {"limit": budget}

    monkeypatch.setattr(Fake, "rematerialized_within", limit, raising=False)
    without_memplan.xla(70, 90, {"offload": True})
    assert limits == [(90, 70)]
    assert [flags for _, flags in limited.compilations] == [{"limit": 90, "offload": True}]


def test_a_refusal_is_one_short_line() -> None:
    assert refusal(ValueError("too large\nat 0x1234")) == "does not compile: too large"
    assert refusal(ValueError("x" * 500)) == f"does not compile: {'x' * 100}"
