"""Small messages between the processes of one run: a JSON object per line over TCP. Nothing received is executed."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
import time
from typing import Any

LONGEST_BYTES = 2**20  # of one message; whoever sends more is not one of us
SEND_S = 1.0  # a peer that takes nothing for this long is treated as closed

Message = dict[str, Any]


class Connection:
    """To one other process. Any thread may send; one thread receives."""

    def __init__(self, opened: socket.socket):
        opened.settimeout(SEND_S)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = opened
        self._rest = b""
        self._sending = threading.Lock()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message) -> bool:
        """False where the other side is gone or takes nothing; the connection is of no use any more then."""
        with self._sending:
            try:
                self._socket.sendall(json.dumps(message).encode() + b"\n")
            except OSError:
                return False
        return True

    def receive(self) -> list[Message] | None:
        """The messages that came in on a connection with something to read; None once the other side is gone.

        Gone is also who sends no messages: another program.
        """
        try:
            chunk = self._socket.recv(2**16)
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            messages = [_message(line) for line in lines]
        except (OSError, ValueError):
            return None
        return messages if chunk and len(self._rest) <= LONGEST_BYTES else None

    def wait(self, timeout_s: float) -> list[Message] | None:
        """The next messages, an empty list after `timeout_s`, None once closed."""
        end = time.monotonic() + timeout_s
        while (left := end - time.monotonic()) > 0:
            if select.select([self._socket], [], [], left)[0]:
                messages = self.receive()
                if messages is None or messages:
                    return messages
        return []

    def close(self, linger_s: float = 0.0) -> None:
        """Close; with `linger_s` only after the other side has read everything and closed too, or that time."""
        with contextlib.suppress(OSError):
            if linger_s:
                self._socket.shutdown(socket.SHUT_WR)
                end = time.monotonic() + linger_s
                while (left := end - time.monotonic()) > 0 and self.wait(left):
                    pass
        self._socket.close()


def _message(line: bytes) -> Message:
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError("a message is an object")
    return message
