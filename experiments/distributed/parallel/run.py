"""Do many devices compute what one computes? `python -m experiments.distributed.parallel.run` (about ten minutes)."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.distributed.parallel.cases import CASES, trained
from experiments.distributed.parallel.table import write_table
from memplan.io import write_atomic
from memplan.outcome.report import versions
from memplan.program.trace import trace
from memplan.verify.numbers import compare, in_pieces

STEPS = 20
LENGTHS = (5, 12)  # equations that are compiled together where the step is cut
LAYOUTS = tuple(
    (processes, total // processes) for total in (1, 2, 4, 8) for processes in (1, 2, 4) if processes <= total
)
RESULTS = Path(__file__).parent / "results" / "cpu.json"


@dataclass(frozen=True)
class Row:
    """One training over some devices against the same on one.

    Attributes:
      off: of the output nearest to its tolerance, the largest difference over the largest magnitude.
      recompilation: the same between the step on one device and that step cut into pieces.
      passes: every leaf of the state, and every loss, is within the gate's tolerance.
    """

    case: str
    processes: int
    devices: int
    options: str
    off: float
    recompilation: float
    tolerance: float
    passes: bool


def references(case: str, steps: int = STEPS) -> list[list[np.ndarray]]:
    """Outputs of training on one device: as one program, and in pieces of two lengths."""
    step, (state, batch) = CASES[case]()
    program = trace(step, (state, batch), {}, {})

    def cut(length: int) -> Callable[..., Any]:
        run = in_pieces(program.jaxpr, length, {})
        return lambda *args: jax.tree.unflatten(program.traced.out_tree, run(jax.tree.leaves(args)))

    return [outputs(*trained(run, state, batch, steps)) for run in (jax.jit(step), *map(cut, LENGTHS))]


def outputs(state: Any, losses: list[float]) -> list[np.ndarray]:
    return [*map(np.asarray, jax.tree.leaves(state)), np.asarray(losses, np.float32)]


def launched(
    folder: Path, processes: int, devices: int, cases: list[str], options: tuple[str, ...] = (), steps: int = STEPS
) -> dict[str, list[np.ndarray]]:
    """Outputs by case of processes with so many devices each."""
    worker = [
        sys.executable,
        "-m",
        "experiments.distributed.parallel.worker",
        "--out",
        str(folder),
        "--steps",
        str(steps),
        *options,
    ]
    main = "from memplan.cli import main; main()"
    launch = [sys.executable, "-c", main, "launch", "-n", str(processes), "--devices", str(devices), "--"]
    done = subprocess.run([*launch, *worker, "--cases", *cases], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(
            f"{processes} processes of {devices} devices failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        )
    return {case: read(folder / f"{case}.npz") for case in cases}


def read(path: Path) -> list[np.ndarray]:
    with np.load(path) as known:
        leaves = [known[name] for name in sorted(name for name in known.files if name != "losses")]
        return [*leaves, known["losses"].astype(np.float32)]


def row(case: str, processes: int, devices: int, options: str, known: Any, found: list[np.ndarray]) -> Row:
    plain, *cut = known
    gate = compare(plain, cut[0], found, *cut[1:])
    leaf = gate.leaves[gate.worst]
    return Row(case, processes, devices, options, leaf.planned, leaf.recompilation, leaf.tolerance, gate.passes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    cases = parser.parse_args().cases
    known = {case: references(case) for case in cases}
    rows = []
    wanted = [(processes, devices, ()) for processes, devices in LAYOUTS]
    wanted += [(2, 4, ("--split-state", "opt_state"))]
    for processes, devices, options in wanted:
        with tempfile.TemporaryDirectory() as folder:
            found = launched(Path(folder), processes, devices, cases, options)
        for case in cases:
            rows.append(row(case, processes, devices, " ".join(options), known[case], found[case]))
            print(rows[-1], flush=True)
    document = {"steps": STEPS, "versions": dict(versions()), "rows": [asdict(one) for one in rows]}
    write_atomic(RESULTS, json.dumps(document, indent=1) + "\n")
    write_table(RESULTS)


if __name__ == "__main__":
    main()
