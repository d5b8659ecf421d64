"""The stand-in's log as operations: what streams were given, what host threads saw of it, what it read and wrote."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from pathlib import Path

_PAGEABLE = "0"


class Kind(Enum):
    WORK = auto()  # a kernel, a copy, a memset, a library call, a host function; a graph's beginning, nodes and end
    RECORD = auto()  # of an event; every recording is a mark of its own
    WAIT = auto()  # of a stream, for a mark
    SEEN = auto()  # a thread has seen a mark reached
    SYNC = auto()  # a thread has seen the end of a stream's operations up to `number`
    TOLD = auto()  # a host function has begun: all threads know the end of what its stream was given up to `number`
    FREE = auto()  # of memory, for which the driver waits until all is done


@dataclass(frozen=True, slots=True)
class Access:
    """To bytes [start, stop)."""

    write: bool
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Op:
    """What the driver was told.

    Attributes:
      line: of the log. thread: of the host. stream: -1 where there is none.
      number: in the order of submission; after: numbers of operations of other streams that it follows.
      mark: of `RECORD`, `WAIT`, `SEEN`.
      launch: number of the beginning of a graph that this is a node of, or the beginning itself, which is node 0.
      after_nodes: nodes of the launch that it follows.
    """

    line: int
    thread: int
    kind: Kind
    stream: int = -1
    number: int = 0
    name: str = ""
    accesses: tuple[Access, ...] = ()
    after: tuple[int, ...] = ()
    mark: int = 0
    launch: int | None = None
    node: int = 0
    after_nodes: tuple[int, ...] = ()


def operations(log: str | Path) -> list[Op]:
    """Operations of a log, in order; the format stands in README.md.

    Raises:
      ValueError: a kernel did not run: nobody knows what it reads and writes.
    """
    lines = [line.split() for line in Path(log).read_text().splitlines()]
    touched = {
        _number(words[1]): _ranges(words[2:]) for _, _, *words in lines if words[0] == "TOUCH"
    }
    return list(_operations(lines, touched))


def _operations(
    lines: Sequence[Sequence[str]], touched: Mapping[int, tuple[Access, ...]]
) -> Iterator[Op]:
    after: tuple[int, ...] = ()  # of the next operation
    latest: dict[int, int] = {}  # stream -> its latest operation
    nodes: dict[int, int] = {}  # of the latest graph: operation -> node
    home = launch = 0  # of the latest graph
    host_functions: dict[int, int] = {}  # number -> stream
    after_nodes: tuple[int, ...] = ()  # of its next node
    for line, thread, event, *words in lines:
        op = partial(Op, int(line), int(thread))
        match event, words:
            case "ORDER", [_, _, numbers]:
                after = _numbers(numbers)
            case "GRAPH", [graph, number, stream, _]:
                home, launch = _number(stream), _number(number)
                nodes, latest[home] = {launch: 0}, launch
                yield op(Kind.WORK, home, launch, f"{graph} begins", after=after, launch=launch)
                after = ()
            case "NODE", [_, _, _, _, numbers]:
                after_nodes = tuple(nodes[operation] for operation in _numbers(numbers))
            case "KERNEL" | "LIBCALL" | "COPY" | "SET" | "EMPTY" | "HOSTFN" | "GRAPHEND", [
                number,
                place,
                *rest,
            ]:
                name, accesses = _work(event, number, rest, touched)
                if place.startswith("g"):
                    node = nodes[_number(number)] = len(nodes)
                    yield op(
                        Kind.WORK, home, _number(number), name, accesses, launch=launch, node=node,
                        after_nodes=after_nodes,
                    )  # fmt: skip
                else:
                    latest[_number(place)] = _number(number)
                    if event == "HOSTFN":
                        host_functions[_number(number)] = _number(place)
                    yield op(Kind.WORK, _number(place), _number(number), name, accesses, after)
                    after = ()
            case "RECORD" | "WAIT", [number, stream, mark, _]:
                latest[_number(stream)] = _number(number)
                yield op(
                    Kind[event],
                    _number(stream),
                    _number(number),
                    event,
                    (),
                    after,
                    mark=_number(mark),
                )
                after = ()
            case "BEGIN", [number] if _number(number) in host_functions:
                yield op(Kind.TOLD, host_functions[_number(number)], _number(number))
            case "SEEN", [mark]:
                yield op(Kind.SEEN, mark=_number(mark))
            case "SYNC", [stream, number]:
                yield op(Kind.SYNC, _number(stream), _number(number))
            case "SYNCALL", []:
                yield from (op(Kind.SYNC, stream, number) for stream, number in latest.items())
            case "FREE" | "HOSTFREE", [start, nbytes]:
                yield op(Kind.FREE, accesses=(_access("w", start, nbytes),))


def _work(
    event: str, number: str, words: Sequence[str], touched: Mapping[int, tuple[Access, ...]]
) -> tuple[str, tuple[Access, ...]]:
    """Name and accesses of a line of the log."""
    match event, words:
        case "KERNEL", [_, name, *_]:
            if _number(number) not in touched:
                raise ValueError(
                    f"{name} ({number}) did not run: what it reads and writes is not known"
                )
            return name, touched[_number(number)]
        case "LIBCALL", [name, _, *ranges]:
            return name, _ranges(ranges)
        case "COPY", [to, source, nbytes, kinds]:
            # A pageable source was read when the call returned; who reads a pageable destination waited for the copy.
            ends = (("r", source, kinds[-2]), ("w", to, kinds[-1]))
            accesses = (
                _access(mode, end[4:], nbytes[2:]) for mode, end, kind in ends if kind != _PAGEABLE
            )
            return f"copy of {nbytes[2:]} bytes", tuple(accesses)
        case "SET", [to, nbytes]:
            return "memset", (_access("w", to[4:], nbytes[2:]),)
    return event, ()


def _number(word: str) -> int:
    """Of a word such as `q12` or `s3`."""
    return int(word[1:])


def _numbers(words: str) -> tuple[int, ...]:
    return tuple(map(_number, words.split(",")))


def _ranges(words: Sequence[str]) -> tuple[Access, ...]:
    """Of words such as `r:0x7f00+16`."""
    return tuple(
        _access(mode, *place.split("+")) for mode, place in (word.split(":") for word in words)
    )


def _access(mode: str, start: str, nbytes: str) -> Access:
    return Access(mode == "w", int(start, 16), int(start, 16) + int(nbytes))
