"""Measures on the local card, each row in a process of its own, and writes a page of findings.

python -m experiments.gpu [--out FOLDER] [--minutes 25]  # continues in a FOLDER that has rows
python -m experiments.gpu --side-by-side 3  # prepares three rows at a time, times one by one
python -m experiments.gpu --report [--out FOLDER]  # writes only the page
"""

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.gpu.findings import page
from experiments.gpu.rows import ROWS, TOY_ROWS, Row
from memplan.io import write_atomic

_ROOT = Path(__file__).parents[2]
_RESULTS = Path(__file__).parent / "results"
_MIN_ROW_S = 30  # Start no row with less time left: none ends sooner.
_GRACE_S = 2  # How long a late row may report where it was.
_START = Row("card", "card", limit_s=120)
_running: set[subprocess.Popen[bytes]] = set()

Record = dict[str, Any]


def main() -> int:
    options, reason = _options(), ""
    if not options.report:
        card = _in_a_process(_START, _RESULTS, _START.limit_s)
        reason = card.get("error") or _why_not(card["card"], options)
        if not reason:
            _measure(card["card"], options)
    try:
        if not reason:
            return int(any("error" in row for row in _write_page(options)))
    except ValueError as error:
        reason = str(error)
    print(f"error: {reason}", file=sys.stderr)
    return 2


def _write_page(options: argparse.Namespace) -> Sequence[Record]:
    paths = sorted(set(options.out.glob("*.json")) - {options.out / "rates.json"})
    rows = [row for path in paths for row in json.loads(path.read_text())]
    write_atomic(
        options.out / "FINDINGS.md",
        page(rows, [row.name for row in _requested(options)], options.toy),
    )
    return rows


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=_RESULTS, help="folder of the rows and the page"
    )
    parser.add_argument("--minutes", type=float, default=25, help="end after this long")
    parser.add_argument(
        "--rows", nargs="*", default=[""], metavar="NAME", help="only those whose names begin so"
    )
    parser.add_argument(
        "--side-by-side", type=int, default=1, metavar="N", help="rows that are prepared at a time"
    )
    parser.add_argument("--again", action="store_true", help="measure those once more that failed")
    parser.add_argument("--report", action="store_true", help="measure nothing, write the page")
    parser.add_argument(
        "--toy", action="store_true", help="toy sizes, to try the script on what is no real card"
    )
    parser.add_argument("--allow-cpu", action="store_true", help="with --toy, without a GPU")
    return parser.parse_args()


def _why_not(card: Record, options: argparse.Namespace) -> str:
    """Why nothing can be measured here; "" if everything is fine."""
    if card["platform"] != "gpu" and not (options.allow_cpu and options.toy):
        return "jax sees no GPU here. Install the extra cuda12 or cuda13 on a machine that has one."
    if not card["real"] and not options.toy:
        return f"this is {card['how']}, not a real card. --toy tries the script on it."
    if not card["real"] and options.out.resolve() == _RESULTS:
        return f"{_RESULTS} is for real cards. Name another folder with --out."
    return ""


def _measure(card: Record, options: argparse.Namespace) -> None:
    """Measure the rows missing in the card's file; rewrites it and the page after every row."""
    deadline = time.monotonic() + 60 * options.minutes
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{re.sub(r'[^a-z0-9]+', '-', card['name'].lower())}.json"
    rows: list[Record] = json.loads(path.read_text()) if path.exists() else []
    measured = {
        row["name"] for row in rows if not (row["cut_short"] or (options.again and "error" in row))
    }
    missing = deque(row for row in _requested(options) if row.name not in measured)
    cut: list[Row] = []
    ended = threading.Event()
    keeping = threading.Lock()

    def work(_: int) -> None:
        while not cut and (left_s := deadline - time.monotonic()) > _MIN_ROW_S:
            with keeping:
                if not missing:
                    return
                row, began = missing.popleft(), time.monotonic()
            outcome = _in_a_process(row, options.out, min(row.limit_s, left_s))
            cut_short = "late" in outcome and left_s < row.limit_s
            ending = {"seconds": time.monotonic() - began, "cut_short": cut_short, **outcome}
            with keeping:
                if ended.is_set():
                    return
                cut.extend([row] if cut_short else [])
                rows[:] = [old for old in rows if old["name"] != row.name]
                rows.append({"card": card, **asdict(row), **ending})
                _keep(rows, path, options)

    with ThreadPoolExecutor(options.side_by_side) as pool:
        try:
            list(pool.map(work, range(options.side_by_side)))
        except BaseException:  # for example a signal: start no other row, end the running ones
            with keeping:
                ended.set()
                missing.clear()
            for process in list(_running):
                _kill(process)
            raise
    if unmeasured := [*cut, *missing]:
        names = ", ".join(repr(row.name) for row in unmeasured)
        print(f"the time is over; call again for {names}", flush=True)


def _keep(rows: Sequence[Record], path: Path, options: argparse.Namespace) -> None:
    """Write the rows and the page, and print how the last row ended."""
    write_atomic(path, json.dumps(rows, indent=1) + "\n")
    with contextlib.suppress(ValueError):  # reported at the end
        _write_page(options)
    name, ending = rows[-1]["name"], rows[-1].get("error", "measured")
    print(f"{name}: {ending[-300:]} ({rows[-1]['seconds']:.0f} s)", flush=True)


def _requested(options: argparse.Namespace) -> list[Row]:
    return [
        row
        for row in (TOY_ROWS if options.toy else ROWS)
        if row.name.startswith(tuple(options.rows))
    ]


def _in_a_process(row: Row, folder: Path, limit_s: float) -> Record:
    """The last record that a row's process printed, and `error` if it failed.

    `late` is set if it exceeded the limit; then it is killed with all of its children.
    """
    command = [
        sys.executable,
        "-m",
        "experiments.gpu.measure",
        json.dumps(asdict(row)),
        str(folder.resolve()),
    ]
    with tempfile.TemporaryDirectory() as place:
        out, err = Path(place, "out"), Path(place, "err")
        with out.open("w") as output, err.open("w") as errors:
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=errors,
                cwd=_ROOT,
                env=_environment(row),
                start_new_session=True,
            )
            ended: Record = {}
            _running.add(process)
            try:
                if process.wait(limit_s):
                    ended = {"error": f"ended with code {process.returncode}"}
            except subprocess.TimeoutExpired:
                process.terminate()  # it reports on stderr where it was
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_GRACE_S)
                ended = {"error": f"ran longer than {limit_s:.0f} s", "late": True}
            finally:
                _kill(process)
                _running.remove(process)
        if ended:
            ended["error"] += f": {err.read_text(errors='replace')[-4000:]}"
        whole = [
            line
            for line in out.read_text().splitlines(keepends=True)
            if line[0] + line[-2:] == "{}\n"
        ]
        return {"pairs": {}, "facts": {}, **(json.loads(whole[-1]) if whole else {}), **ended}


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process with all of its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _environment(row: Row) -> dict[str, str]:
    """Allocate memory on demand, and share XLA's choices of kernels between the rows."""
    flags = [os.environ.get("XLA_FLAGS", ""), row.environment.get("XLA_FLAGS", "")]
    if not row.fresh_kernels:
        cache = Path(tempfile.gettempdir(), f"experiments-gpu-kernels-{os.getuid()}")
        cache.mkdir(exist_ok=True)
        flags.append(f"--xla_gpu_per_fusion_autotune_cache_dir={cache}")
    variables = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ, **row.environment}
    path = os.pathsep.join(filter(None, (variables.get("PYTHONPATH"), str(_ROOT))))
    return {**variables, "XLA_FLAGS": " ".join(filter(None, flags)), "PYTHONPATH": path}


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):  # end the rows' processes too, as for Ctrl-C
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    sys.exit(main())
