"""Traffic on a slow link between two hosts under jax.jit and memplan.jit.

Needs root and Debian's iproute2.

python -m experiments.distributed.slow_link.run [--only LINK ...]  # writes results/*.json
python -m experiments.distributed.slow_link.run --table  # rewrites the table of README.md
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from experiments.readme import command_line, grid
from memplan.results.report import versions

HERE = Path(__file__).parent
DEVICES, STEPS, PORT = 4, 12, 9377
ADDRESS = "10.97.0.{}"
LINKS = {
    "100mbit": ("100mbit", 1500),
    "100mbit-jumbo": ("100mbit", 9000),
    "200mbit-jumbo": ("200mbit", 9000),
}
"""Rate, and bytes of a packet; 66 bytes of each are Ethernet, IP and TCP headers."""
SPACES, INTERFACES = ("memplan0", "memplan1"), ("mplink0", "mplink1")  # by rank


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextlib.contextmanager
def two_hosts(rate: str, packet_nbytes: int) -> Iterator[None]:
    """Two network namespaces joined by a link of this rate in each direction."""
    folders = [Path("/etc/netns") / SPACES[rank] for rank in (0, 1)]
    try:
        for rank, folder in enumerate(folders):
            ip("netns", "add", SPACES[rank])
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "hosts").write_text(
                f"127.0.0.1 localhost\n{ADDRESS.format(rank + 1)} {socket.gethostname()}\n"
            )
        ends = [["name", INTERFACES[rank], "netns", SPACES[rank]] for rank in (0, 1)]
        ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for rank in (0, 1):
            ip(
                "-n",
                SPACES[rank],
                "addr",
                "add",
                f"{ADDRESS.format(rank + 1)}/24",
                "dev",
                INTERFACES[rank],
            )
            ip("-n", SPACES[rank], "link", "set", INTERFACES[rank], "mtu", str(packet_nbytes), "up")
            ip("-n", SPACES[rank], "link", "set", "lo", "up")
            shape = ["tbf", "rate", rate, "burst", "1mbit", "latency", "400ms"]
            ip(
                "netns",
                "exec",
                SPACES[rank],
                "tc",
                "qdisc",
                "add",
                "dev",
                INTERFACES[rank],
                "root",
                *shape,
            )
        yield
    finally:
        for rank, folder in enumerate(folders):
            subprocess.run(["ip", "netns", "del", SPACES[rank]], check=False, capture_output=True)
            (folder / "hosts").unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                folder.rmdir()


def measure(link: str) -> str:
    """Rank 0's figures for a link, as JSON."""
    with two_hosts(*LINKS[link]), tempfile.TemporaryFile("w+") as log:
        workers = []
        for rank in (1, 0):
            arguments = [
                str(rank),
                f"{ADDRESS.format(1)}:{PORT}",
                str(DEVICES),
                INTERFACES[rank],
                str(STEPS),
            ]
            command = [sys.executable, "-m", "experiments.distributed.slow_link.worker", *arguments]
            environment = {
                **os.environ,
                "GLOO_SOCKET_IFNAME": INTERFACES[rank],
                "JAX_PLATFORMS": "cpu",
            }
            out = subprocess.PIPE if rank == 0 else log
            inside = ["ip", "netns", "exec", SPACES[rank], *command]
            workers.append(
                subprocess.Popen(inside, stdout=out, stderr=log, env=environment, text=True)
            )
        output, _ = workers[1].communicate()
        workers[0].wait()
        if any(worker.returncode for worker in workers):
            log.seek(0)
            raise RuntimeError(f"a host failed:\n{log.read()[-4000:]}")
    figures = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    return json.dumps({"link": link, "hosts": 2, "versions": dict(versions()), **figures}, indent=1)


def table() -> str:
    head = (
        "link",
        "step",
        "sent by a host, MiB a step",
        "over the lower bound",
        "ms a step",
        "against jax.jit",
        "last loss",
    )
    lines, releases = [], {}
    for path in sorted((HERE / "results").glob("*.json")):
        document = json.loads(path.read_text())
        releases |= document["versions"]
        hosts, plain = document["hosts"], document["ways"]["jit"]
        for method, row in document["ways"].items():
            bound = (
                2
                * (hosts - 1)
                / hosts
                * document["gradient_bytes"]
                / (2 if method == "bfloat16" else 1)
            )
            over, faster = row["sent_bytes"] / bound, plain["step_s"] / row["step_s"]
            figures = (
                f"{row['sent_bytes'] / 2**20:.2f}",
                f"{over:.3f}",
                f"{1e3 * row['step_s']:.0f}",
                f"{faster:.2f}x",
            )
            lines.append((document["link"], method, *figures, f"{row['losses'][-1]:.4f}"))
    packages = ", ".join(f"{name} {version}" for name, version in releases.items())
    return f"{grid(head, lines)}\n\n{packages}"


if __name__ == "__main__":
    command_line(__doc__, tuple(LINKS), measure, HERE / "README.md", table)
