"""What several processes compare, in one process: the others have already put their values in a store of paper."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import jax
import pytest

from memplan.errors import MemplanError
from memplan.parallel.runtime.cluster import BY_HAND, Cluster
from memplan.parallel.runtime.heartbeats import Member
from memplan.parallel.runtime.preflight import agree, local_versions, preflight
from memplan.program import compat

MEMBERS = {rank: Member(rank, f"node{rank}", 100 + rank) for rank in range(4)}
FOUR = Cluster(1, 4, 1, 4, "node0:1234", BY_HAND, MEMBERS, None)


class Store:
    """Answers for other ranks as told, and with this process's own value where nothing is told."""

    def __init__(self, others: dict[tuple[str, int], Any], absent: tuple[int, ...] = ()):
        self.others = others
        self.absent = absent
        self.own = ""

    def key_value_set(self, key: str, value: str) -> None:
        self.own = value

    def blocking_key_value_get(self, key: str, timeout_ms: int) -> str:
        *_, name, rank = key.split("/")
        if int(rank) in self.absent:
            raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: too late")
        if (name, int(rank)) in self.others:
            text = repr(self.others[name, int(rank)])
            return json.dumps({"text": text, "digest": text})
        return self.own


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Any:
    def tell(others: dict[tuple[str, int], Any], absent: tuple[int, ...] = ()) -> None:
        monkeypatch.setattr(compat, "coordination_client", lambda: Store(others, absent))

    return tell


def test_all_alike(told: Any) -> None:
    told({})
    agree("shapes", {"x": (3, 4), "a": 1}, FOUR)


def test_one_process_agrees_with_itself() -> None:
    agree("shapes", 3, replace(FOUR, processes=1))


@pytest.mark.parametrize("odd", [0, 1, 2, 3])
def test_the_odd_one_is_named_whoever_it_is(told: Any, odd: int) -> None:
    told({("shape", rank): (3, 5) for rank in range(4) if (rank == odd) != (odd == 1)})
    with pytest.raises(MemplanError) as error:
        agree("shape", (3, 4), FOUR)
    assert f"disagree on shape: rank {odd} (host node{odd}, pid {100 + odd}) has " in str(error.value)


def test_of_two_halves_rank_0_is_right(told: Any) -> None:
    told({("seed", 2): 7, ("seed", 3): 7})
    with pytest.raises(MemplanError, match=r"rank 2 \(host node2, pid 102\) \(and rank 3\) has 7, rank 0 .* has 8"):
        agree("seed", 8, FOUR)


def test_long_values_are_shown_where_they_differ(told: Any) -> None:
    told({("plan", 3): "a" * 5000 + "HERE" + "b" * 5000})
    with pytest.raises(MemplanError, match=r"has \.\.\.a+HEREb+\.\.\., rank") as error:
        agree("plan", "a" * 5000 + "THERE" + "b" * 5000, FOUR)
    assert len(str(error.value)) < 1000


def test_who_does_not_answer_is_named(told: Any) -> None:
    told({}, absent=(0, 3))
    with pytest.raises(
        MemplanError, match=r"rank 0 \(host node0, pid 100\), rank 3 .* did not answer for 'shape' within"
    ):
        agree("shape", 1, FOUR, timeout_s=0.01)


def test_other_versions_are_named(told: Any) -> None:
    own = local_versions()
    told({("versions", 2): dict(sorted({**own, "jax": "0.1.2"}.items()))})
    with pytest.raises(MemplanError, match=r"disagree on versions: rank 2 \(host node2.*'jax': '0\.1\.2'"):
        preflight(FOUR)


def test_another_number_or_kind_of_devices_is_named(told: Any) -> None:
    told({("devices of each process", 3): 17})
    with pytest.raises(
        MemplanError, match=r"disagree on devices of each process: rank 3 \(host node3, pid 103\) has 17"
    ):
        preflight(FOUR)
    told({("kind of device", 3): "NVIDIA H200"})
    with pytest.raises(MemplanError, match=r"disagree on kind of device: rank 3 .* has 'NVIDIA H200'"):
        preflight(FOUR)


def test_alone_the_record_is_whole() -> None:
    found = preflight(replace(FOUR, process=0, processes=1))
    assert found.hosts == ("node0",) and found.devices_each == jax.local_device_count()
    assert found.versions["jax"] == jax.__version__
    assert min(found.first_all_reduce_s, found.second_all_reduce_s) > 0
