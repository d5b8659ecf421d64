"""What a slow link between two hosts sees under jax.jit and memplan.jit (root; Debian's iproute2).

python -m experiments.distributed.slow_link.run [--only LINK ...]     # writes results/*.json
python -m experiments.distributed.slow_link.run --table               # rewrites the table of README.md
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

from experiments.readme import grid, measure_and_tell
from memplan.results.report import versions

HERE = Path(__file__).parent
DEVICES, STEPS, PORT = 4, 12, 9377
ADDRESS = "10.97.0.{}"
LINKS = {"100mbit": ("100mbit", 1500), "100mbit-jumbo": ("100mbit", 9000), "200mbit-jumbo": ("200mbit", 9000)}
"""Rate, and bytes of a packet; each has 66 bytes of headers of Ethernet, IP and TCP."""
SPACES, INTERFACES = ("memplan0", "memplan1"), ("mplink0", "mplink1")  # by rank


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextlib.contextmanager
def two_hosts(rate: str, packet_nbytes: int) -> Iterator[None]:
    """Two network namespaces, joined by a link of this rate in each direction, for packets of so many bytes."""
    folders = [Path("/etc/netns") / SPACES[rank] for rank in (0, 1)]
    try:
        for rank, folder in enumerate(folders):
            ip("netns", "add", SPACES[rank])
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{ADDRESS.format(rank + 1)} {socket.gethostname()}\n")
        ends = [["name", INTERFACES[rank], "netns", SPACES[rank]] for rank in (0, 1)]
        ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for rank in (0, 1):
            ip("-n", SPACES[rank], "addr", "add", f"{ADDRESS.format(rank + 1)}/24", "dev", INTERFACES[rank])
            ip("-n", SPACES[rank], "link", "set", INTERFACES[rank], "mtu", str(packet_nbytes), "up")
            ip("-n", SPACES[rank], "link", "set", "lo", "up")
            shape = ["tbf", "rate", rate, "burst", "1mbit", "latency", "400ms"]
            ip("netns", "exec", SPACES[rank], "tc", "qdisc", "add", "dev", INTERFACES[rank], "root", *shape)
        yield
    finally:
        for rank, folder in enumerate(folders):
            subprocess.run(["ip", "netns", "del", SPACES[rank]], check=False, capture_output=True)
            (folder / "hosts").unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                folder.rmdir()


def measure(link: str) -> str:
    """Rank 0's figures over a link, as JSON."""
    with two_hosts(*LINKS[link]), tempfile.TemporaryFile("w+") as log:
        workers = []
        for rank in (1, 0):
            arguments = [str(rank), f"{ADDRESS.format(1)}:{PORT}", str(DEVICES), INTERFACES[rank], str(STEPS)]
            command = [sys.executable, "-m", "experiments.distributed.slow_link.worker", *arguments]
            environment = {**os.environ, "GLOO_SOCKET_IFNAME": INTERFACES[rank], "JAX_PLATFORMS": "cpu"}
            out = subprocess.PIPE if rank == 0 else log
            inside = ["ip", "netns", "exec", SPACES[rank], *command]
            workers.append(subprocess.Popen(inside, stdout=out, stderr=log, env=environment, text=True))
        told, _ = workers[1].communicate()
        workers[0].wait()
        if any(worker.returncode for worker in workers):
            log.seek(0)
            raise RuntimeError(f"a host failed:\n{log.read()[-4000:]}")
    found = json.loads(next(line for line in told.splitlines() if line.startswith("{")))
    return json.dumps({"link": link, "hosts": 2, "versions": dict(versions()), **found}, indent=1)


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
    lines, told = [], {}
    for path in sorted((HERE / "results").glob("*.json")):
        found = json.loads(path.read_text())
        told |= found["versions"]
        hosts, plain = found["hosts"], found["ways"]["jit"]
        for way, one in found["ways"].items():
            bound = 2 * (hosts - 1) / hosts * found["gradient_bytes"] / (2 if way == "bfloat16" else 1)
            over, faster = one["sent_bytes"] / bound, plain["step_s"] / one["step_s"]
            figures = f"{one['sent_bytes'] / 2**20:.2f}", f"{over:.3f}", f"{1e3 * one['step_s']:.0f}", f"{faster:.2f}x"
            lines.append((found["link"], way, *figures, f"{one['losses'][-1]:.4f}"))
    return f"{grid(head, lines)}\n\n{', '.join(f'{name} {version}' for name, version in told.items())}"


if __name__ == "__main__":
    measure_and_tell(__doc__, tuple(LINKS), measure, HERE / "README.md", table)
