"""Ranks meet at one address, or each is told why not. Threads stand in for the processes."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from memplan.errors import MemplanError
from memplan.parallel.runtime import rendezvous
from memplan.parallel.runtime.heartbeats import Member


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as door:
        return f"127.0.0.1:{door.getsockname()[1]}"


def member(rank: int, pid: int = 0) -> Member:
    return Member(rank, "host", pid or 100 + rank)


def together(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """What each returned, or the text of its MemplanError."""

    def told(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except MemplanError as error:
            return str(error)

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(told, calls))


def close(connections: Any) -> None:
    for connection in connections:
        connection.close()


def test_all_know_all() -> None:
    address = free_address()
    calls = [lambda rank=rank: rendezvous.join(address, member(rank), 3, 10.0) for rank in (1, 2)]
    (connections, known), *joined = together([lambda: rendezvous.meet(address, member(0), 3, 10.0), *calls])
    assert set(connections) == {1, 2}
    assert known == {rank: member(rank) for rank in range(3)}
    assert all(members == known for _, members in joined)
    assert joined[0][0].send({"count": 1}) and connections[1].wait(5.0) == [{"count": 1}]
    close([*connections.values(), *(connection for connection, _ in joined)])


def test_the_port_is_free_again_while_the_connections_stay() -> None:
    address = free_address()
    host, port = rendezvous.parse_address(address)
    (connections, _), (connection, _) = together(
        [lambda: rendezvous.meet(address, member(0), 2, 10.0), lambda: rendezvous.join(address, member(1), 2, 10.0)]
    )
    with socket.create_server((host, port)):
        pass
    close([connection, *connections.values()])


def test_whoever_is_missing_is_named_to_all_that_came() -> None:
    address = free_address()
    told = together(
        [lambda: rendezvous.meet(address, member(0), 4, 0.5), lambda: rendezvous.join(address, member(2), 4, 5.0)]
    )
    assert all(one.startswith("ranks 1, 3 of 4 did not show up within 0.5 s") for one in told)


def test_an_unreachable_coordinator_is_named_in_time() -> None:
    address, start = free_address(), time.monotonic()
    with pytest.raises(MemplanError, match=f"could not reach the coordinator {address} within 0.5 s: .*refused"):
        rendezvous.join(address, member(1), 2, 0.5)
    assert time.monotonic() - start < 1.5


def test_a_host_that_does_not_exist_is_named() -> None:
    with pytest.raises(MemplanError, match=r"no-such-host\.invalid:1234 within 0\.3 s"):
        rendezvous.join("no-such-host.invalid:1234", member(1), 2, 0.3)


def test_a_taken_port_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(MemplanError, match=r"cannot listen on port .* another program listens there"):
            rendezvous.meet(address, member(0), 2, 5.0)


def test_two_of_one_rank_are_told_to_both() -> None:
    address = free_address()
    first, *others = together(
        [
            lambda: rendezvous.meet(address, member(0), 3, 10.0),
            lambda: rendezvous.join(address, member(1, 7), 3, 10.0),
            lambda: rendezvous.join(address, member(1, 8), 3, 10.0),
        ]
    )
    assert first.startswith("Two processes call themselves rank 1:") and "pid 7" in first and "pid 8" in first
    assert others == [first, first]


def test_another_number_of_processes_is_told_to_both() -> None:
    address = free_address()
    told = together(
        [lambda: rendezvous.meet(address, member(0), 2, 10.0), lambda: rendezvous.join(address, member(1), 4, 10.0)]
    )
    assert told[0] == told[1] and "was started as one of 4 processes, rank 0 as one of 2" in told[0]


def test_a_rank_that_dies_while_others_are_to_come_is_named() -> None:
    address = free_address()
    host, port = rendezvous.parse_address(address)

    def die() -> None:
        time.sleep(0.3)
        with socket.create_connection((host, port)) as connection:
            connection.sendall(b'{"hello": {"process": 2, "host": "h", "pid": 5}, "processes": 3}\n')
            time.sleep(0.2)

    told = together([lambda: rendezvous.meet(address, member(0), 3, 10.0), die])
    assert told[0].startswith("rank 2 (host h, pid 5) is gone")


def test_a_stranger_is_sent_away() -> None:
    address = free_address()
    host, port = rendezvous.parse_address(address)

    def stranger() -> None:
        time.sleep(0.3)
        with socket.create_connection((host, port)) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert connection.recv(100) == b""

    def late() -> Any:
        time.sleep(0.6)
        return rendezvous.join(address, member(1), 2, 10.0)

    (connections, _), _, (connection, _) = together(
        [lambda: rendezvous.meet(address, member(0), 2, 10.0), stranger, late]
    )
    close([connection, *connections.values()])


def test_someone_else_in_rank_0s_place_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, ThreadPoolExecutor(1) as pool:
        address = f"127.0.0.1:{other.getsockname()[1]}"

        def answer() -> None:
            with other.accept()[0] as connection:
                connection.sendall(b"SSH-2.0\r\n")

        answered = pool.submit(answer)
        with pytest.raises(MemplanError, match="is not rank 0 of this run"):
            rendezvous.join(address, member(1), 2, 0.1)
        answered.result()


@pytest.mark.parametrize("address", ["", "host", "host:", ":12", "host:0", "host:70000", "host:port"])
def test_what_is_no_address_is_told(address: str) -> None:
    with pytest.raises(MemplanError, match="is no address of a coordinator"):
        rendezvous.parse_address(address)


@pytest.mark.parametrize(
    ("address", "found"), [("a.b:1", ("a.b", 1)), ("[::1]:22", ("::1", 22)), ("10.0.0.1:1234", ("10.0.0.1", 1234))]
)
def test_addresses(address: str, found: tuple[str, int]) -> None:
    assert rendezvous.parse_address(address) == found


def test_only_this_machine_is_loopback() -> None:
    assert [rendezvous.is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "10.0.0.1", "node1")] == [
        True, True, True, False, False,
    ]  # fmt: skip
