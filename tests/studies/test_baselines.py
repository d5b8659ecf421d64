"""Ways without a plan: each policy is another program, and XLA is told the budget."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import pytest

from memplan.hardware import catalog
from memplan.hardware.device import Device
from memplan.program.lowerable import Lowerable
from memplan.studies import baselines
from memplan.studies.baselines import Baseline, Baselines, policies, refusal
from memplan.xla.module import read_module
from memplan.xla.replay import replay
from memplan.xla.target import Memory
from tests.dense import step
from tests.xla.small_modules import ADD, chain, module

V100 = catalog.named("v100")
TEXT = module(chain(3, "v") + "\nROOT %end = f32[512,1024]{1,0} negate(%v2)", ADD)
ARGS = ([jnp.ones((4, 4))] * 3, jnp.ones((8, 4)))


@dataclass
class Fake:
    """A target that compiles everything into one text, and keeps the jaxprs and flags that it was given."""

    device: Device = V100
    asked: list[tuple[str, Any]] = field(default_factory=list)
    is_gpu: bool = True

    def mesh_for(self, spmd: object) -> None:
        return None

    def compile(self, made: Lowerable, flags: Any, *_: Any) -> Any:
        self.asked.append((str(jax.make_jaxpr(made.step)(*made.args)), flags))
        return SimpleNamespace(module=read_module(TEXT), memory=Memory(100, 7, 30))


@pytest.fixture
def target() -> Fake:
    return Fake()


@pytest.fixture
def ways(target: Fake) -> Baselines:
    return Baselines(step, ARGS, {}, cast(Any, target))


def test_a_way_takes_what_the_compiler_and_the_replay_say(ways: Baselines) -> None:
    assert ways.plain() == Baseline(100, 7, replay(TEXT, V100).step_s, 70)


def test_policies_differ_in_what_is_saved_and_leave_the_step_alone_afterwards(ways: Baselines, target: Fake) -> None:
    ways.plain()
    for policy in policies().values():
        ways.checkpoint(policy)
    ways.plain()
    (plain, *checkpointed, last), flags = zip(*target.asked, strict=True)
    assert plain == last and "remat" not in plain and "checkpoint" not in plain
    assert plain not in checkpointed and len(set(checkpointed)) >= 3
    for policy, jaxpr in zip(policies().values(), checkpointed, strict=True):
        assert repr(policy).partition(" at 0x")[0] in " ".join(jaxpr.split())  # releases of jax print them differently
    assert not any(flags)


def test_xla_is_told_the_budget_and_what_else_it_may_do(
    ways: Baselines, target: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    limited = replace(target, device=replace(V100, memory_bytes=1))

    def limit(given: Any, budget: int, resident: int) -> Any:
        asked.append((budget, resident))
        return limited, {"limit": budget}

    monkeypatch.setattr(baselines, "xla_rematerialization", limit)
    ways.xla(70, 90, {"offload": True})
    assert asked == [(90, 70)]
    assert [flags for _, flags in limited.asked] == [{"limit": 90, "offload": True}]


def test_a_refusal_is_one_short_line() -> None:
    assert refusal(ValueError("too large\nat 0x1234")) == "does not compile: too large"
    assert refusal(ValueError("x" * 500)) == f"does not compile: {'x' * 100}"
