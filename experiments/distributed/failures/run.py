"""Kill a random process of four at random moments; see how the others end, and whether the next start goes on exactly.

    python -m experiments.distributed.failures.run --out experiments/distributed/failures/results/NAME.json

Half of the runs are started by hand (no launcher looks after them), half with `memplan launch`. CPU devices and gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from memplan import io
from memplan.io import write_atomic

ROOT = Path(__file__).parents[3]
TOY = ROOT / "tests" / "parallel" / "toy.py"
PROCESSES, STEPS, EVERY, PAUSE_S, WATCHDOG_S, MEET_S = 4, 60, 10, 0.03, 5.0, 15.0
SIGNS = (("leaving", "done"), ("training", "step 0"), ("preparing", "rank "), ("joining", "started"), ("importing", ""))
SETTINGS = ("--steps", str(STEPS), "--every", str(EVERY), "--pause-s", str(PAUSE_S),
            "--watchdog-s", str(WATCHDOG_S), "--meet-s", str(MEET_S))  # fmt: skip
MEMPLAN = (sys.executable, "-c", "from memplan.cli import main; main()", "launch", "-n")


@dataclass(frozen=True)
class Trial:
    """One killed run and the one after it.

    Attributes:
      phase: how far the killed process had come, by what it had printed; `step` the last one.
      codes: exit codes, by rank; that of the launcher alone where there is one.
      named: survivors whose own output names the killed rank, and no other.
      launcher_named: the launcher does.
      ended_s: from the kill until all had ended; None where some had to be killed.
      same_losses: the losses of this run and the next together are, bit for bit, those of an undisturbed run.
    """

    launcher: bool
    rank: int
    after_s: float
    phase: str
    step: int
    codes: list[int | None]
    named: int
    launcher_named: bool
    ended_s: float | None
    resumed_at: int | None
    same_losses: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as scratch:
        begun = time.monotonic()
        undisturbed = undisturbed_losses(Path(scratch) / "undisturbed")
        length_s = time.monotonic() - begun
        trials: list[Trial] = []
        while len(trials) < options.trials:
            folder = Path(tempfile.mkdtemp(dir=scratch))
            rank, after_s = draw.randrange(PROCESSES), draw.uniform(0.2, length_s)
            done = trial(folder, len(trials) % 2 == 1, rank, after_s, undisturbed)
            if done is not None:
                trials.append(done)
                print(json.dumps(asdict(done)), flush=True)
    found = {
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": dict(io.versions("jax")),
        "processes": PROCESSES,
        "undisturbed_s": length_s,
        "meet_s": MEET_S,
        "watchdog_s": WATCHDOG_S,
        "seed": options.seed,
        "summary": summary(trials),
        "trials": [asdict(one) for one in trials],
    }
    write_atomic(options.out, json.dumps(found, indent=1) + "\n")
    print(json.dumps(found["summary"], indent=1))


def summary(trials: list[Trial]) -> dict[str, Any]:
    ended = [one.ended_s for one in trials if one.ended_s is not None]
    return {
        "trials": len(trials),
        "phases": {phase: sum(one.phase == phase for one in trials) for phase, _ in SIGNS},
        "all_survivors_ended": len(ended),
        "all_survivors_named_the_rank": sum(one.named == PROCESSES - 1 for one in trials),
        "named_by_the_launcher": sum(one.launcher_named for one in trials),
        "named_by_neither": sum(one.named < PROCESSES - 1 and not one.launcher_named for one in trials),
        "ended_s": {"median": statistics.median(ended), "most": max(ended)} if ended else None,
        "resumed_to_the_same_losses": sum(one.same_losses for one in trials),
    }


class Run:
    """Processes started by hand, or by a launcher with these options; their output by rank.

    Args:
      words: for the training script, besides those of the experiment.
      launcher: options of `memplan launch`; None starts by hand.
      script: another one, with `words` alone.
    """

    def __init__(
        self,
        folder: Path,
        words: Sequence[str] = (),
        *,
        launcher: Sequence[str] | None = None,
        processes: int = PROCESSES,
        script: Path | None = None,
    ):
        folder.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "1"}
        self.processes = processes
        self.launcher = launcher is not None
        toy = [sys.executable, "-u", str(TOY), "--folder", str(folder), *SETTINGS, *words]
        if script is not None:
            toy = [sys.executable, "-u", str(script), *words]
        launch = [*MEMPLAN, str(processes), *(launcher or ()), "--", *toy]
        commands = by_hand(toy, processes) if launcher is None else [launch]
        self.started = [
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            for command in commands
        ]
        self.output = [""] * processes
        self.told = ""  # by the launcher itself
        self.readers = [threading.Thread(target=self.read, args=(number,)) for number in range(len(self.started))]
        for reader in self.readers:
            reader.start()

    def read(self, number: int) -> None:
        source = self.started[number].stdout
        assert source is not None
        with source:
            for line in source:
                if not self.launcher:
                    self.output[number] += line
                elif told := re.match(r"\[(\d+)\] (.*)", line, re.DOTALL):
                    self.output[int(told[1])] += told[2]
                else:
                    self.told += line

    def pid(self, rank: int) -> int | None:
        """None where the run is over; waits for a launcher that is still starting."""
        while all(one.poll() is None for one in self.started):
            if not self.launcher:
                return self.started[rank].pid
            children = f"/proc/{self.started[0].pid}/task/{self.started[0].pid}/children"
            pids = sorted(map(int, Path(children).read_text().split()))
            if len(pids) == self.processes:
                return pids[rank]
            time.sleep(0.005)
        return None

    def wait(self, seconds: float) -> bool:
        """True where all ended by themselves."""
        end = time.monotonic() + seconds
        while (running := [one for one in self.started if one.poll() is None]) and time.monotonic() < end:
            time.sleep(0.01)
        for one in running:
            one.kill()
        for reader in self.readers:
            reader.join(5.0)
        return not running


def by_hand(toy: Sequence[str], processes: int) -> list[list[str]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    joined = ["--coordinator", address, "--processes", str(processes), "--process"]
    return [[*toy, *joined, str(rank)] for rank in range(processes)]


def undisturbed_losses(folder: Path) -> dict[int, str]:
    run = Run(folder)
    if not run.wait(120.0) or any(one.returncode for one in run.started):
        raise SystemExit("the undisturbed run failed:\n" + "\n".join(run.output))
    return losses(folder)


def losses(folder: Path) -> dict[int, str]:
    """Step -> loss as a hexadecimal float; of a step done twice, both must be the same."""
    found: dict[int, set[str]] = {}
    path = folder / "losses.jsonl"
    for line in path.read_text().splitlines() if path.exists() else ():
        one = json.loads(line)
        found.setdefault(one["step"], set()).add(one["loss"])
    return {step: "|".join(sorted(values)) for step, values in found.items()}


def trial(folder: Path, launcher: bool, rank: int, after_s: float, undisturbed: dict[int, str]) -> Trial | None:
    """None where the run was over before the moment came."""
    run = Run(folder, launcher=() if launcher else None)
    time.sleep(after_s)
    if (pid := run.pid(rank)) is None:
        run.wait(60.0)
        return None
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    ended = run.wait(60.0)
    ended_s = time.monotonic() - killed if ended else None
    again = Run(folder, launcher=() if launcher else None)
    again.wait(120.0)
    resumed = re.search(r"resumed at (\d+)", again.output[0])
    steps = re.findall(r"^step (\d+)", run.output[rank], re.MULTILINE)
    others = [run.output[number] for number in range(PROCESSES) if number != rank]
    if not all(names(output, rank) for output in others):
        print(
            run.told, *(f"--- {number}\n{output[-2000:]}" for number, output in enumerate(run.output)), file=sys.stderr
        )
    return Trial(
        launcher=launcher,
        rank=rank,
        after_s=round(after_s, 2),
        phase=phase(run.output[rank]),
        step=int(steps[-1]) if steps else -1,
        codes=[one.returncode for one in run.started],
        named=sum(names(output, rank) for output in others),
        launcher_named=f"rank {rank} (pid {pid}) was killed by SIGKILL" in run.told,
        ended_s=ended_s,
        resumed_at=int(resumed[1]) if resumed else None,
        same_losses=losses(folder) == undisturbed,
    )


def phase(printed: str) -> str:
    return next((phase for phase, sign in SIGNS if sign in printed), "importing")


def names(output: str, rank: int) -> bool:
    """The coordinator that could not be reached is rank 0, and its message says so."""
    told = set(re.findall(r"ranks? (\d+)[^\n]*?(?:is gone|failed:|did not show up|is late|silent)", output))
    if "could not reach the coordinator" in output:
        told.add("0")
    return told == {str(rank)}


if __name__ == "__main__":
    main()
