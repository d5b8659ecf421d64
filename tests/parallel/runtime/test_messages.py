"""Messages between two ends: whole however they arrive, and nothing of a stranger's."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from memplan.parallel.runtime.messages import LONGEST_BYTES, Connection


@pytest.fixture
def ends() -> Iterator[tuple[Connection, socket.socket]]:
    """A connection, and the socket at its other end."""
    with socket.create_server(("127.0.0.1", 0)) as door, socket.create_connection(door.getsockname()) as other:
        here = Connection(door.accept()[0])
        yield here, other
        here.close()


def test_messages_arrive_in_order(ends: tuple[Connection, socket.socket]) -> None:
    here, other = ends
    there = Connection(other)
    assert there.send({"a": [1, "é\n"]}) and there.send({})
    assert here.wait(5.0) == [{"a": [1, "é\n"]}, {}]
    assert here.wait(0.01) == []


def test_a_message_that_comes_in_pieces_is_one(ends: tuple[Connection, socket.socket]) -> None:
    here, other = ends
    other.sendall(b'{"a": 1}\n{"b"')
    assert here.wait(5.0) == [{"a": 1}]
    other.sendall(b": ")
    assert here.wait(0.05) == []
    other.sendall(b"2}\n")
    assert here.wait(5.0) == [{"b": 2}]


@pytest.mark.parametrize("line", [b"GET / HTTP/1.1\r\n", b"[1]\n", b"3\n", b"\n", b"\xff\xfe\n", b'{"a": 1}\n{"b"\n'])
def test_a_strangers_line_closes(ends: tuple[Connection, socket.socket], line: bytes) -> None:
    here, other = ends
    other.sendall(line)
    assert here.wait(5.0) is None


def test_a_message_without_an_end_closes(ends: tuple[Connection, socket.socket]) -> None:
    here, other = ends
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(other.sendall, b'"' + b"x" * (LONGEST_BYTES + 1))
        assert here.wait(5.0) is None
        here.close()
        sent.exception(5.0)


def test_who_is_gone_is_told_apart_from_who_says_nothing(ends: tuple[Connection, socket.socket]) -> None:
    here, other = ends
    assert here.wait(0.01) == []
    other.sendall(b'{"a": 1}\n')
    other.close()
    assert here.wait(5.0) == [{"a": 1}]
    assert here.wait(5.0) is None


def test_nothing_can_be_sent_to_who_is_gone(ends: tuple[Connection, socket.socket]) -> None:
    here, other = ends
    other.close()
    end = time.monotonic() + 5.0
    while here.send({"a": 1}) and time.monotonic() < end:  # the first ones fit into buffers
        pass
    assert not here.send({"a": 1})


def test_a_lingering_close_waits_until_the_other_side_has_read_all(ends: tuple[Connection, socket.socket]) -> None:
    here, other = ends
    there = Connection(other)
    here.send({"last": 1})
    with ThreadPoolExecutor(1) as pool:
        closed = pool.submit(here.close, 5.0)
        assert there.wait(5.0) == [{"last": 1}] and there.wait(5.0) is None
        assert not closed.done()
        there.close()
        closed.result(5.0)
