"""Placements: their words, and which are the same."""

from __future__ import annotations

from memplan.parallel.partition.placement import Partial, PerDevice, Replicate, Shard


def test_their_words() -> None:
    assert list(map(str, (Replicate(), Partial(), PerDevice(), Shard(2)))) == ["whole", "partial", "own", "split(2)"]


def test_each_is_only_itself() -> None:
    assert len({Replicate(), Replicate(), Partial(), PerDevice(), Shard(0), Shard(0), Shard(1)}) == 5
