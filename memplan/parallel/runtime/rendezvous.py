"""All processes meet at the coordinator's address before jax is asked to: whoever does not come is named.

jax.distributed ends a process in C++ where the coordinator cannot be reached, where its port is taken or where a
process is missing (jax 0.10 and 0.11), and names nobody. So rank 0 listens on that port first, collects the others,
closes the port for jax and keeps the connections: one that breaks later tells at once which process died.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import ipaddress
import selectors
import socket
import time
from collections.abc import Iterator, Mapping

from memplan.errors import MemplanError
from memplan.parallel.runtime.heartbeats import Member
from memplan.parallel.runtime.messages import Connection

RETRY_S = 0.2
Members = Mapping[int, Member]


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port` or `[v6]:port`; a MemplanError where it is neither."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise MemplanError(f"{address!r} is no address of a coordinator. Write host:port, for example 10.0.0.1:1234.")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def meet(address: str, me: Member, processes: int, timeout_s: float) -> tuple[dict[int, Connection], Members]:
    """What rank 0 does: wait for all others; raises a MemplanError naming whoever is missing after `timeout_s`."""
    opened: list[Connection] = []
    joined: dict[int, tuple[Connection, Member]] = {}
    try:
        with _listening(address) as door:
            _admit(door, opened, joined, processes, timeout_s)
    except MemplanError as error:
        for connection in opened:
            connection.send({"error": str(error)})
        for connection in opened:
            connection.close(linger_s=0.2)
        raise
    connections = {rank: connection for rank, (connection, _) in joined.items()}
    members = {me.process: me} | {rank: member for rank, (_, member) in joined.items()}
    for connection in opened:
        if connection in connections.values():
            connection.send({"members": [dataclasses.asdict(member) for member in members.values()]})
        else:
            connection.close()
    return connections, members


@contextlib.contextmanager
def _listening(address: str) -> Iterator[socket.socket]:
    """On all interfaces, unless the address is for this machine only."""
    host, port = parse_address(address)
    family = (
        socket.AF_INET6 if ":" in host or (not is_loopback(host) and socket.has_dualstack_ipv6()) else socket.AF_INET
    )
    try:
        place = (host if is_loopback(host) else "", port)
        door = socket.create_server(place, family=family, dualstack_ipv6=family == socket.AF_INET6 and not place[0])
    except OSError as error:
        why = "another program listens there" if error.errno == errno.EADDRINUSE else error.strerror
        raise MemplanError(
            f"Rank 0 cannot listen on port {port} of {address}: {why}. End that program or choose another port, "
            "the same for all processes."
        ) from error
    with door:
        yield door


def _admit(
    door: socket.socket,
    opened: list[Connection],
    joined: dict[int, tuple[Connection, Member]],
    processes: int,
    timeout_s: float,
) -> None:
    end = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as ready:
        ready.register(door, selectors.EVENT_READ, None)
        while len(joined) < processes - 1:
            left = end - time.monotonic()
            if left <= 0:
                raise MemplanError(_missing(set(range(1, processes)) - set(joined), processes, timeout_s))
            for key, _ in ready.select(left):
                connection: Connection | None = key.data
                if connection is None:
                    opened.append(Connection(door.accept()[0]))
                    ready.register(opened[-1], selectors.EVENT_READ, opened[-1])
                elif not _receive(connection, joined, processes):
                    ready.unregister(connection)
                    connection.close()


def _receive(connection: Connection, joined: dict[int, tuple[Connection, Member]], processes: int) -> bool:
    """A first message is a hello; an end after that is a death. False where the connection is a stranger's."""
    known = next((member for one, member in joined.values() if one is connection), None)
    messages = connection.receive()
    if messages is None and known is not None:
        raise MemplanError(f"{known} is gone: its connection closed while others were still to come.")
    hello = next((message for message in messages or () if "hello" in message), None)
    if known is None and hello is not None:
        member = Member(**hello["hello"])
        _check_hello(member, hello["processes"], joined, processes)
        joined[member.process] = connection, member
    return messages is not None


def _check_hello(member: Member, wanted: int, joined: Mapping[int, tuple[Connection, Member]], processes: int) -> None:
    if wanted != processes:
        raise MemplanError(
            f"{member} was started as one of {wanted} processes, rank 0 as one of {processes}. Start all alike."
        )
    if member.process in joined:
        raise MemplanError(
            f"Two processes call themselves rank {member.process}: {joined[member.process][1]} and {member}. "
            "Give each its own rank."
        )
    if not 0 < member.process < processes:
        raise MemplanError(
            f"{member} cannot join rank 0 of {processes} processes: the others are 1 to {processes - 1}."
        )


def _missing(absent: set[int], processes: int, timeout_s: float) -> str:
    ranks = f"rank{'s' if len(absent) > 1 else ''} {', '.join(map(str, sorted(absent)))}"
    return (
        f"{ranks} of {processes} did not show up within {timeout_s:g} s. Look at their own output: they may have "
        "failed before they came here, or wait elsewhere. If starting merely takes longer, raise timeout_s."
    )


def join(address: str, me: Member, processes: int, timeout_s: float) -> tuple[Connection, Members]:
    """What every other rank does; a MemplanError where rank 0 cannot be reached within `timeout_s`, or says why not."""
    host, port = parse_address(address)
    end = time.monotonic() + timeout_s
    reason = "nothing answered"
    while (left := end - time.monotonic()) > 0:
        try:
            connection = Connection(socket.create_connection((host, port), timeout=left))
        except OSError as error:
            reason = error.strerror or str(error)
        else:
            connection.send({"hello": dataclasses.asdict(me), "processes": processes})
            # rank 0 may have started later, and then waits that long itself
            messages = connection.wait(timeout_s + 5.0)
            message = messages[0] if messages else {}
            if "members" in message:
                members = [Member(**fields) for fields in message["members"]]
                return connection, {member.process: member for member in members}
            connection.close()
            if "error" in message:
                raise MemplanError(message["error"])
            reason = "who listens there is not rank 0 of this run, or rank 0 ended"
        time.sleep(min(RETRY_S, max(0.0, end - time.monotonic())))
    raise MemplanError(
        f"Rank {me.process} of {processes} could not reach the coordinator {address} within {timeout_s:g} s: {reason}. "
        "Is rank 0 running, is this its address, and does a firewall let the port through? If it starts later, raise "
        "timeout_s."
    )
