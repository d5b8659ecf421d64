"""Compile the steps and store their modules: `python -m tests.goldens.make [KEY..]`.

A key is NAME-DEVICE. `--expect` writes what is expected of the stored modules instead, `--texts`
what `test_texts` expects. `--print KEY SHARE` prints the module that is written for a budget, for
`diff` between two commits.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import jax

from memplan import pipeline
from memplan.compilation.attempts import copies_by_itself
from memplan.errors import MemplanError
from memplan.program import compat
from memplan.program.slabs.choose import SlabChoices
from memplan.request import Request, traced
from tests.goldens import expected, texts
from tests.goldens.planned import (
    FOLDER,
    REPOSITORY,
    UNLIMITED,
    Case,
    cases,
    plan_module,
    scheduled_module,
)
from tests.goldens.printed import read_print
from tests.goldens.steps import STEPS

SHARES = (0.4, 0.6, 0.8)
TOPOLOGY = "today@2x4"
ON_DEVICES = {
    "mlp": "cpu v100",
    "mlp-undonated": "a100",
    "mlp-bfloat16": "h100",
    "pinned": "cpu a100",
    "pinned-recompute": "v100",
    "pinned-scanned": "v100",
    "conv-net": "cpu v100",
    "pooling": "cpu v100",
    "u-net-2d": "cpu v100",
    "u-net-3d": "v100",
    "slabs": "v100",
    "scanned": "cpu v100",
    "decoder": "h100",
    "decoder-scanned": "a100",
    "decoder-dropout": "a100",
    "decoder-bfloat16": "h100",
    "branching": "cpu a100",
    "looping": "cpu v100",
    "custom-vjp": "a100",
    "embedding": "cpu a100",
    "fft": "v100",
    "cholesky": "cpu",
    "filled": "v100",
    "data-parallel": "v100",
    "fsdp": "a100",
    "fsdp-scanned": "a100",
    "tensor-parallel": "a100",
}
KEYS = [f"{name}-{device}" for name, devices in ON_DEVICES.items() for device in devices.split()]
# Compiled by jax 0.11.2 on a real card (experiments/gpu).
MEASURED = "experiments/gpu/results/kernels/nvidia-h200"
ON_A_CARD = {"kernels-of-2d-u-net": SHARES, "kernels-of-decoder-bfloat16": (0.6,)}

# What XLA handed to the hook: whether it was scheduled, and the module.
_handed: list[tuple[bool, bytes]] = []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("keys", nargs="*", help="all by default")
    parser.add_argument("--expect", action="store_true")
    parser.add_argument("--texts", action="store_true")
    parser.add_argument("--print", nargs=2, metavar=("KEY", "SHARE"), dest="printed")
    options = parser.parse_args()
    if options.printed:
        key, share = options.printed
        case = cases()[key]
        assert case.budgets is not None
        proto = plan_module(case, case.budgets[share]).proto
        sys.stdout.writelines(f"{line}\n" for line in read_print(compat.module_text(proto)).lines())
    elif options.texts:
        for name in options.keys or texts.TEXTS:
            texts.path(name).write_text(texts.TEXTS[name]())
            sys.stdout.write(f"{name}\n")
    elif options.expect:
        for key in options.keys or cases():
            began = time.perf_counter()
            expected.write(cases()[key])
            sys.stdout.write(f"{key}: {time.perf_counter() - began:.1f} s\n")
    else:
        _record_what_is_handed()
        for key in options.keys or [*KEYS, *(f"{name}-h200" for name in ON_A_CARD)]:
            began = time.perf_counter()
            case = _measured(key) if key.endswith("-h200") else _compiled(key)
            _store(case, ON_A_CARD.get(key.removesuffix("-h200"), SHARES))
            sys.stdout.write(f"{key}: {time.perf_counter() - began:.1f} s\n")


def _record_what_is_handed() -> None:
    register: Callable[..., None] = compat.register_hook

    def recording(callback: Any, platform: str, scheduled: bool) -> None:
        def record(proto: bytes) -> bytes | None:
            _handed.append((scheduled, proto))
            return callback(proto)

        register(record, platform, scheduled)

    compat.register_hook = recording


def _compiled(key: str) -> Case:
    name, _, device = key.rpartition("-")
    step = STEPS[name]
    request = Request(
        UNLIMITED,
        device=None if device == "cpu" else device,
        split=False,
        topology=TOPOLOGY if step.shardings else None,
        pin=step.pins or None,
    )
    plain = traced(step.function, step.arguments, {}, step.options, request)
    program = pipeline._candidates(plain, request).first
    program = _in_slabs(program, request) if step.in_slabs else program
    compiler = pipeline._compiler(program, request, lambda stage, share: None)
    _handed.clear()
    compiler.compile(program, hides_latency=copies_by_itself(program))
    scheduled = [proto for is_scheduled, proto in _handed if is_scheduled][-1]
    partitioned = [proto for is_scheduled, proto in _handed if not is_scheduled][-1]
    file = _pack(key, scheduled)
    case = Case(
        key,
        file,
        device,
        jax.__version__,
        request.target.backend.platform,
        pins=tuple((pin.name, pin.where.value) for pin in program.pins),
        in_slabs=step.in_slabs,
    )
    if program.machine is None:
        return case
    return replace(
        case,
        partitioned_file=_pack(f"{key}-partitioned", partitioned),
        topology=TOPOLOGY,
        devices=program.machine.devices,
        asked_sizes=tuple(sorted(compat.constrained_sizes(program.traced.jaxpr))),
    )


def _telling(case: Case, shares: Sequence[float], plain_bytes: int) -> Sequence[float]:
    """The shares that a plan fits, and the largest that none does: below, plans are alike."""
    if len(shares) == 1:
        return shares
    fitting = [share for share in shares if _fits(case, int(share * plain_bytes))]
    missed = [share for share in shares if share not in fitting]
    return sorted([*(fitting or [0.95]), *missed[-1:]])


def _fits(case: Case, budget_bytes: int) -> bool:
    try:
        return plan_module(case, budget_bytes).module.fits
    except MemplanError:
        return False


def _in_slabs(program: Any, request: Request) -> Any:
    """The first of the step in slabs for half of its arrays' bytes."""
    device = request.target.device
    nbytes = 40 * 64**3 * 16 * 4 // 2
    candidates = SlabChoices(program, device).programs(nbytes, device.memory_bytes, 10.0)
    return next(iter(candidates)).write()


def _measured(key: str) -> Case:
    name = key.removesuffix("-h200")
    return Case(key, f"{MEASURED}/{name}.hlo.gz", "h200", "0.11.2", "cuda")


def _pack(name: str, proto: bytes) -> str:
    path = FOLDER / "modules" / f"{name}.hlo.gz"
    path.write_bytes(gzip.compress(proto, 9, mtime=0))
    return str(path.relative_to(REPOSITORY))


def _store(case: Case, shares: Sequence[float]) -> None:
    """The case with its budgets, among the others."""
    plain_bytes = scheduled_module(case).device_bytes
    budgets = {
        str(share): int(share * plain_bytes) for share in _telling(case, shares, plain_bytes)
    }
    entry = asdict(replace(case, plain_bytes=plain_bytes, budgets=budgets))
    del entry["key"]
    path = FOLDER / "cases.json"
    stored = json.loads(path.read_text()) if path.exists() else {}
    stored = dict(sorted({**stored, case.key: entry}.items()))
    path.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main()
