"""What a slow link between two hosts sees: flat, decomposed and compressed sums (root; Debian's iproute2).

python -m experiments.distributed.slow_link.run [RATE ...]     # 100mbit 200mbit; writes results/*.json
python -m experiments.distributed.slow_link.run --table        # rewrites the table of README.md
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from experiments.distributed.slow_link.table import write_table
from memplan.io import write_atomic
from memplan.outcome.report import versions

HERE = Path(__file__).parent
DEVICES, STEPS, PORT = 4, 12, 9377
ADDRESS = "10.97.0.{}"


def space(rank: int) -> str:
    return f"memplan{rank}"


def interface(rank: int) -> str:
    return f"mplink{rank}"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextlib.contextmanager
def two_hosts(rate: str) -> Iterator[None]:
    """Two network namespaces, joined by a link of this rate in each direction."""
    folders = [Path("/etc/netns") / space(rank) for rank in (0, 1)]
    try:
        for rank, folder in enumerate(folders):
            ip("netns", "add", space(rank))
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{ADDRESS.format(rank + 1)} {socket.gethostname()}\n")
        ends = [["name", interface(rank), "netns", space(rank)] for rank in (0, 1)]
        ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for rank in (0, 1):
            ip("-n", space(rank), "addr", "add", f"{ADDRESS.format(rank + 1)}/24", "dev", interface(rank))
            ip("-n", space(rank), "link", "set", interface(rank), "up")
            ip("-n", space(rank), "link", "set", "lo", "up")
            shape = ["tbf", "rate", rate, "burst", "1mbit", "latency", "400ms"]
            ip("netns", "exec", space(rank), "tc", "qdisc", "add", "dev", interface(rank), "root", *shape)
        yield
    finally:
        for rank, folder in enumerate(folders):
            subprocess.run(["ip", "netns", "del", space(rank)], check=False, capture_output=True)
            (folder / "hosts").unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                folder.rmdir()


def measure(rate: str) -> dict[str, object]:
    """What rank 0 found over a link of this rate."""
    with two_hosts(rate), tempfile.TemporaryFile("w+") as log:
        workers = []
        for rank in (1, 0):
            arguments = [str(rank), f"{ADDRESS.format(1)}:{PORT}", str(DEVICES), interface(rank), str(STEPS)]
            command = [sys.executable, "-m", "experiments.distributed.slow_link.worker", *arguments]
            environment = {**os.environ, "GLOO_SOCKET_IFNAME": interface(rank), "JAX_PLATFORMS": "cpu"}
            out = subprocess.PIPE if rank == 0 else log
            inside = ["ip", "netns", "exec", space(rank), *command]
            workers.append(subprocess.Popen(inside, stdout=out, stderr=log, env=environment, text=True))
        told, _ = workers[1].communicate()
        workers[0].wait()
        if any(worker.returncode for worker in workers):
            log.seek(0)
            raise RuntimeError(f"a host failed:\n{log.read()[-4000:]}")
    return json.loads(next(line for line in told.splitlines() if line.startswith("{")))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rates", nargs="*", default=["100mbit", "200mbit"])
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    results = HERE / "results"
    for rate in options.rates if not options.table else ():
        document = {"rate": rate, "hosts": 2, "versions": dict(versions()), **measure(rate)}
        results.mkdir(exist_ok=True)
        write_atomic(results / f"{rate}.json", json.dumps(document, indent=1) + "\n")
    write_table(results)


if __name__ == "__main__":
    main()
