"""Spread arrays hold on every device what a model has that moves the elements one by one."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Hashable, Sequence

import numpy as np
import pytest

from memplan.verify.moves import around
from memplan.verify.pieces import ZERO
from memplan.verify.spreads import Owners, Spread, Spreads, Teams

Held = list[np.ndarray]  # on every device an array of elements (source, place, devices summed)


def elements(spreads: Spreads, spread: Spread) -> list[list[Hashable]]:
    """What each device holds, one by one."""
    return [
        [
            element
            for piece in spread.on(device)
            for element in _of_piece(spreads.owners, piece, device)
        ]
        for device in range(spreads.devices)
    ]


def _of_piece(owners: Owners, piece: tuple, device: int) -> list[Hashable]:
    source, start, digits, tables = piece
    contents: list[Hashable] = []
    for place in itertools.product(*(range(digit.size) for digit in digits)):
        if source == ZERO:
            contents.append((ZERO, 0, ()))
            continue
        step = sum(at * digit.stride for at, digit in zip(place, digits, strict=True))
        turn = sum(at * digit.owner_stride for at, digit in zip(place, digits, strict=True))
        contents.append((source, start + step, owners.members(tables[turn], device)))
    return contents


def array(values: Sequence[Hashable], dims: Sequence[int]) -> np.ndarray:
    cells = np.empty(len(values), dtype=object)
    for number, value in enumerate(values):
        cells[number] = value
    return cells.reshape(dims)


def model_sum(shards: Held, teams: Teams) -> Held | None:
    sums: list[np.ndarray] = []
    for device in range(len(shards)):
        members = [shards[member] for member in teams.group[device]]
        total: list[Hashable] = []
        for terms in zip(*(member.ravel() for member in members), strict=True):
            if len({(source, place) for source, place, _ in terms}) > 1:
                return None
            total.append(
                (
                    *terms[0][:2],
                    tuple(sorted(device for _, _, owners in terms for device in owners)),
                )
            )
        sums.append(array(total, shards[device].shape))
    return sums


class Pair:
    """A spread array and its model, of some sizes."""

    def __init__(self, spread: Spread, shards: Held) -> None:
        self.spread, self.held = spread, shards

    @property
    def dims(self) -> tuple[int, ...]:
        return self.held[0].shape


class World:
    """Two sources on some devices, and random instructions."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.devices = self.random.choice((2, 4, 6, 8))
        self.spreads = Spreads(self.devices)
        self.teams = [Teams(self._groups()) for _ in range(3)]
        self.results: Counter[str] = Counter()
        self.pairs = [
            self._source(number, dims) for number, dims in enumerate(((4, 6), (24,), (2, 3, 4)))
        ]

    def _groups(self) -> tuple[tuple[int, ...], ...]:
        size = self.random.choice([size for size in (1, 2, 3, 4, 6, 8) if self.devices % size == 0])
        order = list(range(self.devices))
        if self.random.random() < 0.5:
            self.random.shuffle(order)
        if self.random.random() < 0.5:
            return tuple(
                tuple(order[at :: self.devices // size]) for at in range(self.devices // size)
            )
        return tuple(tuple(order[at : at + size]) for at in range(0, self.devices, size))

    def _source(self, number: int, dims: Sequence[int]) -> Pair:
        size = math.prod(dims)
        shards = [
            array([(number, at, (device,)) for at in range(size)], dims)
            for device in range(self.devices)
        ]
        return Pair(self.spreads.whole(number, size, self.spreads.owners.own), shards)

    def step(self) -> None:
        """A random instruction on a random array."""
        pair = self.random.choice(self.pairs[-4:])
        instruction: Callable[[Pair], tuple[Spread | None, Held | None]] = self.random.choice(
            (
                self.all_reduce,
                self.all_gather,
                self.reduce_scatter,
                self.turn,
                self.reshape,
                self.cut,
                self.join,
            )
        )
        spread, shards = instruction(pair)
        if spread is None:
            return
        self.results[instruction.__name__] += 1
        assert shards is not None, f"{instruction.__name__} makes a sum of what differs"
        assert elements(self.spreads, spread) == [list(shard.ravel()) for shard in shards]
        if shards[0].size <= 600:
            self.pairs.append(Pair(spread, shards))

    def all_reduce(self, pair: Pair) -> tuple[Spread | None, Held | None]:
        teams = self.random.choice(self.teams)
        return self.spreads.summed(pair.spread, teams), model_sum(pair.held, teams)

    def all_gather(self, pair: Pair) -> tuple[Spread | None, Held | None]:
        teams, dim = self.random.choice(self.teams), self.random.randrange(len(pair.dims))
        members = (
            [pair.held[member] for member in teams.group[device]] for device in range(self.devices)
        )
        shards = [np.concatenate(arrays, axis=dim) for arrays in members]
        return self.spreads.gathered(pair.spread, teams, math.prod(pair.dims[:dim])), shards

    def reduce_scatter(self, pair: Pair) -> tuple[Spread | None, Held | None]:
        teams, dim = self.random.choice(self.teams), self.random.randrange(len(pair.dims))
        spread = self.spreads.scattered(pair.spread, teams, around(pair.dims, dim))
        if spread is None or (total := model_sum(pair.held, teams)) is None:
            return spread, None
        return spread, [
            np.split(total[device], teams.size, axis=dim)[teams.rank[device]]
            for device in range(self.devices)
        ]

    def turn(self, pair: Pair) -> tuple[Spread | None, Held | None]:
        order = self.random.sample(range(len(pair.dims)), len(pair.dims))
        return self.spreads.turned(pair.spread, pair.dims, order), [
            shard.transpose(order) for shard in pair.held
        ]

    def reshape(self, pair: Pair) -> tuple[Spread | None, Held | None]:
        size, dims = pair.held[0].size, list[int]()
        while size > 1 and len(dims) < 3:
            dims.append(
                self.random.choice([side for side in range(1, size + 1) if size % side == 0])
            )
            size //= dims[-1]
        return pair.spread, [shard.reshape([*dims, size]) for shard in pair.held]

    def cut(self, pair: Pair) -> tuple[Spread | None, Held | None]:
        dim = self.random.randrange(len(pair.dims))
        low = self.random.randrange(pair.dims[dim])
        high = self.random.randrange(low, pair.dims[dim]) + 1
        shards = [shard.take(range(low, high), axis=dim) for shard in pair.held]
        return self.spreads.narrowed(pair.spread, around(pair.dims, dim), low, high), shards

    def join(self, pair: Pair) -> tuple[Spread | None, Held | None]:
        """With another array, and zeros, then an exchange of equal parts."""
        partner, zeros = self.random.choice(self.pairs[-4:]), self.spreads.zeros(2)
        nothing = array([(ZERO, 0, ())] * 2, (2,))
        shards = [
            np.concatenate([first.ravel(), second.ravel(), nothing])
            for first, second in zip(pair.held, partner.held, strict=False)
        ]
        spread = self.spreads.joined([pair.spread, partner.spread, zeros])
        teams = self.random.choice(self.teams)
        if spread is None or shards[0].size % teams.size:
            return spread, shards
        return self._exchange(spread, shards, teams)

    def _exchange(
        self, spread: Spread, shards: Held, teams: Teams
    ) -> tuple[Spread | None, Held | None]:
        part = shards[0].size // teams.size
        marks = range(0, shards[0].size, part)
        sent = [
            self.spreads.narrowed(spread, (1, shards[0].size, 1), low, low + part) for low in marks
        ]
        got = self.spreads.exchanged([piece for piece in sent if piece is not None], teams)
        parts = [np.split(shard, teams.size) for shard in shards]
        model = [
            np.concatenate([parts[member][teams.rank[device]] for member in teams.group[device]])
            for device in range(self.devices)
        ]
        return self.spreads.joined([piece for piece in got if piece is not None]), model


@pytest.mark.parametrize("seed", range(40))
def test_holds_what_the_model_holds(seed: int) -> None:
    world = World(seed)
    for _ in range(30):
        world.step()
    by_meaning: dict[Hashable, Hashable] = {}
    for pair in world.pairs:
        shards = tuple(tuple(shard.ravel()) for shard in pair.held)
        assert by_meaning.setdefault(world.spreads.meaning(pair.spread), shards) == shards


def test_makes_most_of_what_it_is_given() -> None:
    counts: Counter[str] = Counter()
    for seed in range(20):
        world = World(seed)
        for _ in range(30):
            world.step()
        counts += world.results
    assert (
        min(
            counts[name]
            for name in ("all_reduce", "all_gather", "reduce_scatter", "turn", "cut", "join")
        )
        > 10
    )


def test_a_sum_of_pieces_gathered_again_is_the_sum() -> None:
    spreads = Spreads(8)
    inner, outer = Teams(((0, 1, 2, 3), (4, 5, 6, 7))), Teams(((0, 4), (1, 5), (2, 6), (3, 7)))
    whole = spreads.whole(7, 24, spreads.owners.own)
    piece = spreads.scattered(whole, inner, (1, 24, 1))
    assert piece is not None and len(piece.rows) == 4
    total = spreads.summed(piece, outer)
    assert total is not None
    again, at_once = (
        spreads.gathered(total, inner, 1),
        spreads.summed(whole, Teams((tuple(range(8)),))),
    )
    assert again is not None and at_once is not None
    assert again == at_once
    assert spreads.meaning(again) != spreads.meaning(whole)
