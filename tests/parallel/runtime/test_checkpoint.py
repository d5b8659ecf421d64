"""Checkpoints of one process: what comes back, what is kept, and what is refused."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from memplan.errors import MemplanError
from memplan.parallel.runtime.checkpoint import Checkpoints
from memplan.parallel.runtime.launch import Launch, launch


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    step: Any
    params: Any
    opt_state: Any


def state(scale: float = 1.0) -> TrainState:
    params = {
        "w": scale * jnp.arange(3000.0).reshape(60, 50),
        "b": jnp.full(3, scale, jnp.bfloat16),
        "a/b.c": jnp.ones(2),
    }
    return TrainState(jnp.int32(3), params, optax.adamw(1e-3).init(params))


def like(one: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), one)


def same(one: Any, other: Any) -> bool:
    alike = jax.tree.map(lambda a, b: a.dtype == b.dtype and bool((a == b).all()), one, other)
    return jax.tree.structure(one) == jax.tree.structure(other) and all(jax.tree.leaves(alike))


@pytest.fixture
def saved(tmp_path: Path) -> Checkpoints:
    checkpoints = Checkpoints(tmp_path / "new" / "folder", every=10, keep=2)
    for step in range(1, 41):
        assert checkpoints.save(step, state(step)) == (step % 10 == 0)
    return checkpoints


def test_the_newest_comes_back_as_it_was(saved: Checkpoints) -> None:
    assert saved.steps() == [30, 40] and saved.latest() == 40
    step, found = saved.restore(like(state()))
    assert step == 40 and same(found, state(40))
    assert isinstance(found.opt_state[0], optax.ScaleByAdamState)


def test_an_older_one_when_asked_for(saved: Checkpoints) -> None:
    step, found = saved.restore(state(), step=30)
    assert step == 30 and same(found, state(30))
    with pytest.raises(MemplanError, match=r"no step 20 in .*holds the steps \[30, 40\]"):
        saved.restore(state(), step=20)


def test_an_empty_folder_is_told(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path).latest() is None
    with pytest.raises(MemplanError, match="no complete checkpoint"):
        Checkpoints(tmp_path / "none").restore(state())


def test_a_step_can_be_saved_again_and_out_of_turn(saved: Checkpoints) -> None:
    assert saved.save(40, state(7.0)) and saved.save(41, state(8.0), force=True)
    assert same(saved.restore(state(), step=40)[1], state(7.0)) and saved.latest() == 41


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_typed_keys_come_back_as_keys(tmp_path: Path, impl: str) -> None:
    one = {"key": jax.random.key(5, impl=impl), "many": jax.random.split(jax.random.key(6, impl=impl), 4)}
    Checkpoints(tmp_path).save(1, one)
    for wanted in (one, like(one)):
        found = Checkpoints(tmp_path).restore(wanted)[1]
        assert same(jax.tree.map(jax.random.key_data, found), jax.tree.map(jax.random.key_data, one))
        assert [str(jax.random.key_impl(key)) for key in found.values()] == [impl, impl]


def test_keys_of_another_generator_are_refused(tmp_path: Path) -> None:
    Checkpoints(tmp_path).save(1, {"key": jax.random.key(5)})
    with pytest.raises(MemplanError, match=r"\['key'\]: key<threefry2x32>\[\], wanted key<rbg>\[\]"):
        Checkpoints(tmp_path).restore({"key": jax.random.key(5, impl="rbg")})


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"w": jnp.zeros((60, 51))}, r"state\.params\['w'\]: float32\[60, 50\], wanted float32\[60, 51\]"),
        (
            {"w": jnp.zeros((60, 50), jnp.bfloat16)},
            r"state\.params\['w'\]: float32\[60, 50\], wanted bfloat16\[60, 50\]",
        ),
        ({"z": jnp.zeros(2)}, r"state\.params\['z'\]: not saved, wanted float32\[2\]"),
    ],
    ids=["shape", "dtype", "new"],
)
def test_another_state_is_refused(saved: Checkpoints, other: dict[str, Any], told: str) -> None:
    wanted = state()
    with pytest.raises(MemplanError, match=f"000000040 holds another state than is wanted: {told}"):
        saved.restore(replace(wanted, params={**wanted.params, **other}))


def test_another_optimizer_is_refused(saved: Checkpoints) -> None:
    wanted = replace(state(), opt_state=optax.sgd(0.1).init(state().params))
    with pytest.raises(MemplanError, match=r"opt_state.* wanted not.*and 2 more"):
        saved.restore(wanted)


def flip(path: Path) -> None:
    held = bytearray(path.read_bytes())
    held[len(held) // 2] ^= 0x40
    path.write_bytes(held)


@pytest.mark.parametrize("harm", [flip, Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-9])])
def test_damage_is_named_and_the_older_one_not_taken_silently(saved: Checkpoints, harm: Any) -> None:
    folder = saved.folder / "000000040"
    largest = max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    harm(largest)
    with pytest.raises(MemplanError) as error:
        saved.restore(state())
    assert f"Checkpoint 40 is damaged: {largest}: " in str(error.value)
    assert "take an older one with restore(like, step=30)" in str(error.value)
    assert same(saved.restore(state(), step=30)[1], state(30))


def test_a_damaged_manifest_is_named(saved: Checkpoints) -> None:
    (saved.folder / "000000040" / "memplan.json").write_text("{")
    with pytest.raises(MemplanError, match=r"Checkpoint 40 is damaged: .*memplan\.json"):
        saved.restore(state())


def test_a_save_that_was_killed_does_not_count(saved: Checkpoints) -> None:
    (saved.folder / "000000040" / "memplan.json").unlink()
    (saved.folder / "000000050.orbax-checkpoint-tmp").mkdir()
    assert saved.latest() == 30
    assert saved.save(40, state(1.5)) and same(saved.restore(state())[1], state(1.5))
    assert not list(saved.folder.glob("*tmp*"))


@pytest.mark.parametrize("leaf", [3, 2.0, "text", jax.ShapeDtypeStruct((2,), jnp.float32)], ids=str)
def test_what_is_no_array_is_named(tmp_path: Path, leaf: Any) -> None:
    with pytest.raises(MemplanError, match=r"state\['n'\] is .*: checkpoints hold jax arrays"):
        Checkpoints(tmp_path).save(1, {"n": leaf})


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MemplanError, match="Step 1 cannot be saved in"):
        Checkpoints(tmp_path / "file" / "folder").save(1, state())


@pytest.mark.parametrize("wrong", [{"every": 0}, {"keep": 0}])
def test_settings_that_make_no_sense(tmp_path: Path, wrong: dict[str, int]) -> None:
    with pytest.raises(MemplanError, match="must be at least 1"):
        Checkpoints(tmp_path, **wrong)


def test_without_orbax_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    monkeypatch.setitem(sys.modules, "orbax", None)
    with pytest.raises(MemplanError, match=r"pip install 'memplan\[parallel\]'"):
        Checkpoints(tmp_path).save(1, state())


SAVED = """
import sys, jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from memplan import parallel
cluster = parallel.initialize()
mesh = jax.make_mesh((2,), ("host",))
shardings = {"w": NamedSharding(mesh, PartitionSpec("host")), "n": NamedSharding(mesh, PartitionSpec())}
state = jax.jit(lambda: {"w": jnp.arange(8.0), "n": jnp.int32(3)}, out_shardings=shardings)()
checkpoints = parallel.Checkpoints(sys.argv[1])
for step in range(1, 9):
    checkpoints.save(step, state)
    checkpoints.restore(state, step=step)  # by a rank that is ahead of rank 0, too
print("restored", checkpoints.latest())
"""


def test_what_two_processes_saved_either_restores_at_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(Launch((sys.executable, "-c", SAVED, str(tmp_path)), 2, devices=1)) == 0, capfd.readouterr().err
    told = capfd.readouterr().out
    assert [told.count(f"[{rank}] restored 8") for rank in range(2)] == [1, 1]
