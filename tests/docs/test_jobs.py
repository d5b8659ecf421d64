"""The training for clusters, started as Slurm and JobSet do it: killed and started again, its losses lose no bit."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
JOBS = ROOT / "docs" / "examples" / "jobs"
PROCESSES, STEPS = 2, 12
Started = Callable[[int, int], Mapping[str, str]]  # (rank, a free port) -> variables of the process


def jobset() -> dict[str, Any]:
    return yaml.safe_load((JOBS / "jobset.yaml").read_text())


def by_jobset(rank: int, port: int) -> Mapping[str, str]:
    """What the file sets, as the first pod is here and listens on another port."""
    (job,) = jobset()["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    named = {variable["name"]: variable.get("value", str(rank)) for variable in container["env"]}
    return named | {"MEMPLAN_COORDINATOR": f"127.0.0.1:{port}"}


def by_slurm(rank: int, port: int) -> Mapping[str, str]:
    """What jax asks of Slurm's variables."""
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": str(PROCESSES),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "JAX_COORDINATOR_PORT": str(port),
    }


KILLED = """
import os, runpy, signal, sys
from memplan.parallel.step import DataParallel
assemble, left = DataParallel.assemble, [int(sys.argv[2])]
def counted(self, batch):
    left[0] -= 1
    if left[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return assemble(self, batch)
DataParallel.assemble = counted
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def run(folder: Path, started: Started, killed_after: int | None = None) -> list[tuple[int, str]]:
    """Losses by step, of rank 0; rank 1 is killed after so many steps, and rank 0 must then end by itself."""
    script = [str(JOBS / "train.py")]
    killed = script if killed_after is None else ["-c", KILLED, *script, str(killed_after)]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = {"CHECKPOINTS": str(folder), "BUDGET": "600KiB", "STEPS": str(STEPS)}
    surroundings = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "PYTHONUNBUFFERED": "1",
    }
    first, second = (
        subprocess.Popen(
            [sys.executable, *command],
            env={**surroundings, **started(rank, port), **settings},
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            text=True,
        )
        for rank, command in enumerate((script, killed))
    )
    losses, output = [], ""
    try:
        assert first.stdout is not None
        with first.stdout:
            for line in first.stdout:
                output += line
                if line.startswith("step"):
                    _, number, *_, loss = line.split()
                    losses.append((int(number), loss))
        codes = first.wait(), second.wait()
    finally:
        first.kill(), second.kill()
    assert f"rank 0 of {PROCESSES}" in output and "planner kernels" in output, output
    assert codes == (0, 0) if killed_after is None else codes[0] != 0 and codes[1] == -9, output
    return losses


@pytest.mark.slow
def test_a_killed_training_continues_to_the_bit(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", by_jobset)
    assert [number for number, _ in whole] == list(range(STEPS))
    # each is killed with a checkpoint under way; the one before it is whole
    killed = ((by_slurm, 4), (by_jobset, 7), (by_slurm, None))
    parts = [run(tmp_path / "killed", started, after) for started, after in killed]
    begins = [part[0][0] for part in parts]
    assert begins[0] == 0 and begins[1] in (1, 4) and begins[2] - begins[1] in (3, 6)
    for part in parts:
        assert part == whole[part[0][0] : part[0][0] + len(part)]
    assert parts[-1][-1] == whole[-1]


SRUN = """#!/usr/bin/env bash
echo "$@" >> "$SLURM_SUBMIT_DIR/started"
[ "$(wc -l < "$SLURM_SUBMIT_DIR/started")" -ge "$GOOD" ]
"""


@pytest.mark.parametrize(("good", "attempts", "code"), [(1, 1, 0), (3, 3, 0), (9, 3, 1)])
def test_slurms_script_starts_what_failed_again(
    tmp_path: Path, good: int, attempts: int, code: int
) -> None:
    """With a `srun` of our own, whose attempts succeed from a number on."""
    srun, activate = tmp_path / "bin" / "srun", tmp_path / ".venv" / "bin" / "activate"
    for path, text in ((srun, SRUN), (activate, "")):
        path.parent.mkdir(parents=True)
        path.write_text(text)
        path.chmod(0o755)
    paths = f"{srun.parent}{os.pathsep}{os.environ['PATH']}"
    environment = {
        **os.environ,
        "PATH": paths,
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "GOOD": str(good),
    }
    done = subprocess.run(
        ["bash", str(JOBS / "slurm.sh")], env=environment, capture_output=True, check=False
    )
    started = (tmp_path / "started").read_text().splitlines()
    assert (done.returncode, len(started)) == (code, attempts)
    assert all(
        line.endswith(f" python {tmp_path}/train.py") and "--kill-on-bad-exit=1" in line
        for line in started
    )


def test_slurm_gives_each_process_one_gpu() -> None:
    """As jax takes one for each process under Slurm."""
    options = dict(
        re.findall(r"^#SBATCH --([\w-]+)=(.+)$", (JOBS / "slurm.sh").read_text(), re.MULTILINE)
    )
    assert options["ntasks-per-node"] == options["gpus-per-node"]


def test_the_jobset_names_its_first_pod_and_all_ranks() -> None:
    spec = jobset()["spec"]
    (job,) = spec["replicatedJobs"]
    pods = job["template"]["spec"]
    (container,) = pods["template"]["spec"]["containers"]
    named = {variable["name"]: variable.get("value") for variable in container["env"]}
    host, _, port = named["MEMPLAN_COORDINATOR"].partition(":")
    assert (
        host == f"{jobset()['metadata']['name']}-{job['name']}-0-0.{spec['network']['subdomain']}"
    )
    assert int(port) in [container_port["containerPort"] for container_port in container["ports"]]
    assert pods["completionMode"] == "Indexed" and named["MEMPLAN_PROCESS"] is None
    assert (
        int(named["MEMPLAN_PROCESSES"] or 0)
        == pods["completions"]
        == pods["parallelism"]
        == PROCESSES
    )
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert any((named["CHECKPOINTS"] or "").startswith(path) for path in mounted)
