"""Measures on the card that is here, each row in a process of its own, and writes a page of findings.

python -m experiments.gpu [--out FOLDER] [--minutes 25]      # again with the same FOLDER: goes on where it ended
python -m experiments.gpu --side-by-side 3                  # rows are prepared together, and timed one by one
python -m experiments.gpu --report [--out FOLDER]           # only the page
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
_LEAST_S = 30  # in less no row ends
_LAST_WORDS_S = 2  # of a row that is late
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
    write_atomic(options.out / "FINDINGS.md", page(rows, [row.name for row in _asked(options)], options.toy))
    return rows


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=_RESULTS, help="folder of the rows and the page")
    parser.add_argument("--minutes", type=float, default=25, help="end after this long")
    parser.add_argument("--rows", nargs="*", default=[""], metavar="NAME", help="only those whose names begin so")
    parser.add_argument("--side-by-side", type=int, default=1, metavar="N", help="rows that are prepared at a time")
    parser.add_argument("--again", action="store_true", help="measure those once more that failed")
    parser.add_argument("--report", action="store_true", help="measure nothing, write the page")
    parser.add_argument("--toy", action="store_true", help="toy sizes, to try the script on what is no real card")
    parser.add_argument("--allow-cpu", action="store_true", help="with --toy, without a GPU")
    return parser.parse_args()


def _why_not(card: Record, options: argparse.Namespace) -> str:
    """Why nothing is measured here; "" where all is well."""
    if card["platform"] != "gpu" and not (options.allow_cpu and options.toy):
        return "jax sees no GPU here. Install the extra cuda12 or cuda13 on a machine that has one."
    if not card["real"] and not options.toy:
        return f"this is {card['how']}, not a real card. --toy tries the script on it."
    if not card["real"] and options.out.resolve() == _RESULTS:
        return f"{_RESULTS} is for real cards. Name another folder with --out."
    return ""


def _measure(card: Record, options: argparse.Namespace) -> None:
    """What is missing in the card's file, which is written whole after every row, and so is the page."""
    deadline = time.monotonic() + 60 * options.minutes
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{re.sub(r'[^a-z0-9]+', '-', card['name'].lower())}.json"
    rows: list[Record] = json.loads(path.read_text()) if path.exists() else []
    known = {row["name"] for row in rows if not (row["cut_short"] or (options.again and "error" in row))}
    missing = deque(row for row in _asked(options) if row.name not in known)
    cut: list[Row] = []
    ended = threading.Event()
    keeping = threading.Lock()

    def keep(row: Row, record: Record) -> None:
        rows[:] = [*(one for one in rows if one["name"] != row.name), record]
        write_atomic(path, json.dumps(rows, indent=1) + "\n")
        with contextlib.suppress(ValueError):  # which is told at the end
            _write_page(options)
        print(f"{row.name}: {record.get('error', 'measured')[-300:]} ({record['seconds']:.0f} s)", flush=True)

    def work(_: int) -> None:
        while not cut and (left_s := deadline - time.monotonic()) > _LEAST_S:
            with keeping:
                if not missing:
                    return
                row, began = missing.popleft(), time.monotonic()
            found = _in_a_process(row, options.out, min(row.limit_s, left_s))
            cut_short = "late" in found and left_s < row.limit_s
            record = {"card": card, **asdict(row), "seconds": time.monotonic() - began, "cut_short": cut_short, **found}
            with keeping:
                if ended.is_set():
                    return
                cut.extend([row] if cut_short else [])
                keep(row, record)

    with ThreadPoolExecutor(options.side_by_side) as pool:
        try:
            list(pool.map(work, range(options.side_by_side)))
        except BaseException:  # as of a signal: no other row begins, and those that run end
            with keeping:
                ended.set()
                missing.clear()
            for process in list(_running):
                _kill(process)
            raise
    if left := [*cut, *missing]:
        print(f"the time is over; call again for {', '.join(repr(row.name) for row in left)}", flush=True)


def _asked(options: argparse.Namespace) -> list[Row]:
    return [row for row in (TOY_ROWS if options.toy else ROWS) if row.name.startswith(tuple(options.rows))]


def _in_a_process(row: Row, folder: Path, limit_s: float) -> Record:
    """What it printed last, and how it ended if not well; `late` where it was killed, with all that it started."""
    command = [sys.executable, "-m", "experiments.gpu.measure", json.dumps(asdict(row)), str(folder.resolve())]
    with tempfile.TemporaryDirectory() as place:
        out, err = Path(place, "out"), Path(place, "err")
        with out.open("w") as output, err.open("w") as errors:
            process = subprocess.Popen(
                command, stdout=output, stderr=errors, cwd=_ROOT, env=_environment(row), start_new_session=True
            )
            ended: Record = {}
            _running.add(process)
            try:
                if process.wait(limit_s):
                    ended = {"error": f"ended with code {process.returncode}"}
            except subprocess.TimeoutExpired:
                process.terminate()  # it says on stderr where it was
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_LAST_WORDS_S)
                ended = {"error": f"ran longer than {limit_s:.0f} s", "late": True}
            finally:
                _kill(process)
                _running.remove(process)
        if ended:
            ended["error"] += f": {err.read_text(errors='replace')[-4000:]}"
        whole = [line for line in out.read_text().splitlines(keepends=True) if line[0] + line[-2:] == "{}\n"]
        return {"pairs": {}, "facts": {}, **(json.loads(whole[-1]) if whole else {}), **ended}


def _kill(process: subprocess.Popen[bytes]) -> None:
    """With all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _environment(row: Row) -> dict[str, str]:
    """Memory is taken as it is needed; kernels that XLA has timed are chosen in all rows alike."""
    flags = [os.environ.get("XLA_FLAGS", ""), row.environment.get("XLA_FLAGS", "")]
    if not row.fresh_kernels:
        cache = Path(tempfile.gettempdir(), f"experiments-gpu-kernels-{os.getuid()}")
        cache.mkdir(exist_ok=True)
        flags.append(f"--xla_gpu_per_fusion_autotune_cache_dir={cache}")
    known = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ, **row.environment}
    path = os.pathsep.join(filter(None, (known.get("PYTHONPATH"), str(_ROOT))))
    return {**known, "XLA_FLAGS": " ".join(filter(None, flags)), "PYTHONPATH": path}


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C: the row's process ends, too
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    sys.exit(main())
