"""Plain JAX, `jax.checkpoint` and memplan on the card that is here, one process each; writes one JSON file.

python -m experiments.gpu --out experiments/gpu/results/NAME.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax

from experiments.gpu.measure import CASES, TOYS, checksum_error
from memplan import io
from memplan.io import write_atomic

SHARES = (0.6, 0.4)
HELD = "-scan"  # the end of the names of cases that also run with their state on the host


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=440, help="start nothing new after this long")
    parser.add_argument("--allow-cpu", action="store_true", help="toy sizes, to try the script")
    options = parser.parse_args()
    device = jax.devices()[0]
    if device.platform != "gpu" and not options.allow_cpu:
        print(
            "error: jax sees no GPU here. Install the extra cuda12 or cuda13 on a machine that has one.",
            file=sys.stderr,
        )
        return 2
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    deadline = time.monotonic() + options.seconds
    rows: list[dict[str, Any]] = []
    for case in CASES if device.platform == "gpu" else TOYS:
        rows.extend(measured(case, deadline))
        write_atomic(options.out, json.dumps(document(rows, device), indent=1) + "\n")
    return 0 if all("error" not in row for row in rows) else 1


def measured(case: str, deadline: float) -> list[dict[str, Any]]:
    """All ways of one case; memplan's compared with the plain step's numbers."""
    plain = one(case, "plain", 1.0, 0, deadline)
    rows = [plain]
    if "error" in plain:
        return rows
    rows.append(one(case, "checkpoint", 1.0, 0, deadline))
    for share in SHARES:
        rows.append(one(case, "memplan", share, plain["compiled_bytes"], deadline))
    if case.endswith(HELD):
        rows.append(one(case, "held", max(SHARES), plain["compiled_bytes"], deadline))
    for row in rows[1:]:
        if "error" not in row:
            row["state_error"] = checksum_error(plain["checksum"], row["checksum"])
            row["loss_error"] = abs(row["first_loss"] - plain["first_loss"]) / abs(plain["first_loss"])
            row["step_ratio"] = row["step_s"][0] / plain["step_s"][0]
    for row in rows:
        row.pop("checksum", None)
    return rows


def one(case: str, way: str, share: float, plain_bytes: int, deadline: float) -> dict[str, Any]:
    known = {"case": case, "way": way, "share": share}
    left = deadline - time.monotonic()
    if left < 20:
        return {**known, "error": "no time left"}
    command = [sys.executable, "-m", "experiments.gpu.measure", case, way, str(share), str(plain_bytes)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=left, check=False)
    except subprocess.TimeoutExpired:
        return {**known, "error": "ran out of time"}
    if done.returncode:
        return {**known, "error": done.stderr[-2000:]}
    row = {**known, **json.loads(done.stdout.splitlines()[-1])}
    print(json.dumps({name: value for name, value in row.items() if name != "checksum"}), flush=True)
    return row


def document(rows: list[dict[str, Any]], device: Any) -> dict[str, Any]:
    return {
        "hardware": device.device_kind,
        "memory_fraction": os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION"),
        "versions": dict(io.versions("jax")),
        "rows": rows,
    }


if __name__ == "__main__":
    sys.exit(main())
