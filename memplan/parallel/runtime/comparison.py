"""What each rank gave to the run, compared: whose rows, values or programs are not those of the others.

Rank 0 makes it. Pure: no sockets, no clock of its own.
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections import Counter
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from memplan.parallel.runtime.heartbeats import Member

ROWS, VALUES, PROGRAM = "rows", "values", "program"
PATIENCE_S = 2.0  # of two ranks that differ nobody knows who is odd: the others are waited for this long
APART = " in a thread"  # ends the key of batches that are not made by the main thread: it may be ahead of the steps
TEXT_CHARACTERS = 200_000  # of what is shown where ranks differ: some 20 kB compressed, from every rank to rank 0
SHOWN = 160  # characters of a line in a message
VERBS = {ROWS: "brings other rows to", VALUES: "gives other values to", PROGRAM: "has another program for"}
ADVICE = {
    ROWS: "All must bring equally many rows of the same types to every step: drop or pad a last, smaller batch on all",
    VALUES: "Was it another seed or checkpoint? Begin all alike, or give all the values of one with "
    "jax.experimental.multihost_utils.broadcast_one_to_all",
    PROGRAM: "All must run the same script, versions and options",
}


@dataclass(frozen=True)
class Submission:
    """One thing that a rank gave to the run, to be compared with what the others gave.

    Attributes:
      kind: ROWS, VALUES or PROGRAM.
      key: the same for what must be alike; `name` is what a message calls it.
      digest: of all of it; `text` its lines, compressed, to show where it differs.
      among: ranks that must give the same.
      number: rows: from this batch on, until others are said.
    """

    kind: str
    key: str
    name: str
    digest: str
    text: str
    among: tuple[int, ...]
    number: int = 0

    @property
    def place(self) -> tuple[str, int]:
        return self.key, self.number


def submission(kind: str, key: str, name: str, lines: Collection[str], among: tuple[int, ...]) -> Submission:
    whole = "\n".join(lines)
    digest = hashlib.blake2b(whole.encode(), digest_size=16).hexdigest()
    text = base64.b64encode(zlib.compress(whole[:TEXT_CHARACTERS].encode())).decode()
    return Submission(kind, key, name, digest, text, among)


def from_message(fields: Mapping[str, Any]) -> Submission:
    return Submission(**{**fields, "among": tuple(fields["among"])})


@dataclass
class _Question:
    """Something that all of some ranks must give alike; `split_s` is when two answers first differed."""

    asked: Submission
    answers: dict[int, Submission] = field(default_factory=dict)
    split_s: float | None = None

    @property
    def complete(self) -> bool:
        return set(self.asked.among) <= set(self.answers)

    @property
    def digests(self) -> dict[int, str]:
        return {rank: one.digest for rank, one in self.answers.items()}


class Comparison:
    """Rows and programs are questions that all must answer alike; values are compared whenever one is settled.

    So a rank may place values or look at shapes by itself, if it also gives what the others give.
    """

    def __init__(self, members: Mapping[int, Member]):
        self._members = members
        self._open: dict[tuple[str, int], _Question] = {}
        self._rows: dict[str, dict[int, list[Submission]]] = {}
        self._values: dict[int, dict[str, Submission]] = {rank: {} for rank in members}
        self._programs: dict[tuple[str, tuple[int, ...]], dict[int, Submission]] = {}
        self._batches: dict[int, Mapping[str, int]] = {rank: {} for rank in members}

    def add(self, rank: int, one: Submission) -> None:
        if one.kind == VALUES:
            self._values[rank][one.digest] = one
            return
        question = self._open.setdefault(one.place, _Question(one))
        question.answers[rank] = one
        if one.kind == ROWS:
            self._rows.setdefault(one.key, {}).setdefault(rank, []).append(one)
        else:
            self._programs.setdefault((one.name, one.among), {})[rank] = one

    def advance(self, rank: int, batches: Mapping[str, int]) -> None:
        """How many batches of each key this rank has begun; what it said about them is here already."""
        self._batches[rank] = dict(batches)

    def judge(self, now_s: float, left: Collection[int] = ()) -> tuple[list[tuple[str, int]], str | None]:
        """What has been settled since, and a sentence about who differs or left while others wait for it."""
        settled = []
        for place, question in list(self._open.items()):
            self._repeat_rows(question)
            verdict = self._differ(question, now_s) or self._departed(question, left)
            if verdict is None and question.complete and len(set(question.digests.values())) == 1:
                del self._open[place]
                settled.append(place)
                self._forget(question.asked)
                verdict = self._other_values(question.asked.among)
            if verdict:
                return settled, verdict
        return settled, self._other_shapes(now_s)

    def _repeat_rows(self, question: _Question) -> None:
        """Who has come as far and said nothing new brings what it brought before."""
        one = question.asked
        for rank in set(one.among) - set(question.answers) if one.kind == ROWS else ():
            before = [known for known in self._rows[one.key].get(rank, ()) if known.number <= one.number]
            if before and self._batches[rank].get(one.key, 0) >= one.number:
                question.answers[rank] = before[-1]

    def _forget(self, settled: Submission) -> None:
        """Of what came before only the last counts, for batches that bring the same."""
        for rank, known in self._rows.get(settled.key, {}).items():
            before = [one for one in known if one.number <= settled.number]
            self._rows[settled.key][rank] = before[-1:] + [one for one in known if one.number > settled.number]

    def _differ(self, question: _Question, now_s: float) -> str | None:
        digests = question.digests
        if len(set(digests.values())) < 2:
            return None
        question.split_s = question.split_s or now_s
        if not question.complete and now_s - question.split_s < PATIENCE_S:
            return None
        number = f" in batch {question.asked.number}" if question.asked.kind == ROWS else ""
        return self._verdict(question.answers, digests, number)

    def _departed(self, question: _Question, left: Collection[int]) -> str | None:
        one = question.asked
        missing = [rank for rank in one.among if rank in left and rank not in question.answers]
        if one.kind != ROWS or one.key.endswith(APART) or not missing:
            return None
        had = self._batches[missing[0]].get(one.key, 0)
        waiting = ", ".join(str(rank) for rank in sorted(question.answers))
        return (
            f"{self._ranks(missing)} left after batch {had} of {one.name} while rank {waiting} waits in batch "
            f"{one.number}. All must make equally many steps"
        )

    def _other_values(self, among: tuple[int, ...]) -> str | None:
        """Each of two ranks has given values that the other has not."""
        given = {rank: frozenset(d for d, one in self._values[rank].items() if one.among == among) for rank in among}
        usual = majority_rank(given)
        odd = [rank for rank in among if given[rank] - given[usual] and given[usual] - given[rank]]
        if not odd:
            return None
        theirs, ours = self._last_other(odd[0], given[usual]), self._last_other(usual, given[odd[0]])
        return self._sentence(odd, usual, theirs, ours, "")

    def _last_other(self, rank: int, common: Collection[str]) -> Submission:
        """The last value of this rank that is not among these."""
        return [one for digest, one in self._values[rank].items() if digest not in common][-1]

    def _other_shapes(self, now_s: float) -> str | None:
        """All wait with a step of one name, but not with the same shapes."""
        for (_, among), last in self._programs.items():
            questions = {rank: self._open.get(one.place) for rank, one in last.items()}
            waiting = [question for question in questions.values() if question is not None]
            keys = {rank: one.key for rank, one in last.items()}
            if set(last) != set(among) or len(waiting) < len(among) or len(set(keys.values())) < 2:
                continue
            for question in waiting:
                question.split_s = question.split_s or now_s
            if all(now_s - (question.split_s or now_s) >= PATIENCE_S for question in waiting):
                return self._verdict(last, keys, "")
        return None

    def _verdict(self, answers: Mapping[int, Submission], digests: Mapping[int, str], where: str) -> str:
        usual = majority_rank(digests)
        odd = [rank for rank in sorted(answers) if digests[rank] != digests[usual]]
        return self._sentence(odd, usual, answers[odd[0]], answers[usual], where)

    def _sentence(self, odd: list[int], usual: int, theirs: Submission, ours: Submission, where: str) -> str:
        one, other = _difference(theirs.text, ours.text)
        return (
            f"{self._ranks(odd)} {VERBS[theirs.kind]} {theirs.name}{where} than {self._members[usual]}: {one} against "
            f"{other}. {ADVICE[theirs.kind]}"
        )

    def _ranks(self, ranks: Collection[int]) -> str:
        first, *rest = ranks
        also = f" (and rank {', '.join(map(str, rest))})" if rest else ""
        return f"{self._members[first]}{also}"


def majority_rank(digests: Mapping[int, Hashable]) -> int:
    """The first rank that gave what most gave; of two halves that of rank 0 (or the first known) is right."""
    counts, first = Counter(digests.values()), min(digests)
    most = max(counts, key=lambda digest: (counts[digest], digest == digests[first]))
    return min(rank for rank, digest in digests.items() if digest == most)


def _difference(one: str, other: str) -> tuple[str, str]:
    """The first line that differs, of both."""
    mine, yours = _lines(one), _lines(other)
    for a, b in zip(mine, yours, strict=False):
        if a != b:
            return _shortened(a), _shortened(b)
    return f"{len(mine)} lines", f"{len(yours)} lines"


def _lines(text: str) -> list[str]:
    return zlib.decompress(base64.b64decode(text)).decode(errors="replace").split("\n")


def _shortened(line: str) -> str:
    plain = " ".join(line.split())
    return repr(plain if len(plain) <= SHOWN else plain[:SHOWN] + "...")
