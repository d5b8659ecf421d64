"""A decoder scanned over its layers: memplan's residuals against the policies of `jax.checkpoint`.

python -m experiments.loops.run [--only NAME ...]    # plans and compiles (extra gpu-aot), writes results/
python -m experiments.loops.run --table              # rewrites the tables of README.md
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from experiments.readme import measure_and_tell
from memplan import pipeline
from memplan.outcome.summary import versions
from memplan.pipeline import Outcome, Request
from memplan.planning.loop import stacked_nbytes
from models.train import decoder_step
from models.transformer import CHECKPOINTS, DecoderConfig

HERE = Path(__file__).parent
RESULTS, README = HERE / "results", HERE / "README.md"
CASES = {f"{device}-{kind}": (device, dtype) for device in ("h200", "a100")
         for kind, dtype in (("f32", jnp.float32), ("bf16", jnp.bfloat16))}  # fmt: skip
SHARES = (0.5, 0.3, 0.2)
OPTIONS = {"donate_argnums": 0}
UNLIMITED = 2**62  # bytes: the step stays as it is
MIB = 2**20


@dataclass(frozen=True)
class Row:
    """A compiled program: bytes by the compiler, seconds by the roofline.

    Attributes:
      way: `plain`, a policy, or memplan's within a share of plain's bytes.
      predicted_bytes: on the device, before it was compiled; None for what memplan did not plan.
      copy_s, hidden_s: of copies to and from the host, and of these what lies under computation.
    """

    way: str
    device_bytes: int
    host_bytes: int
    step_s: float
    predicted_bytes: int | None
    copy_s: float
    hidden_s: float


def measure(name: str) -> dict[str, Any]:
    device, dtype = CASES[name]

    def compiled(checkpoint: str, budget: int | None) -> Outcome:
        config = DecoderConfig(scan=True, checkpoint=checkpoint, dtype=dtype)
        step, args = decoder_step(batch=8, tokens=1024, config=config)
        return pipeline.best(step, args, {}, OPTIONS, Request(budget, device=device))

    def row(way: str, one: Outcome, planned: bool) -> Row:
        copies = one.planned.result.traffic
        predicted = one.planned.predicted_bytes if planned else None
        figures = one.device_bytes, one.host_bytes, copies.step_s, predicted, copies.copy_s, copies.hidden_copy_s
        print(name, way, *figures, flush=True)
        return Row(way, *figures)

    plain = compiled("", UNLIMITED)
    rows = [row("plain", plain, planned=False)]
    rows += [row(f"jax.checkpoint, {policy}", compiled(policy, UNLIMITED), planned=False) for policy in CHECKPOINTS]
    for share in SHARES:
        one = compiled("", int(share * plain.device_bytes))
        rows.append(row(f"memplan within {share:.0%}{_residuals(one)}", one, planned=True))
    return {"rows": [asdict(one) for one in rows], "versions": dict(versions())}


def _residuals(found: Outcome) -> str:
    """What the loops stack, where it was chosen anew."""
    if not any(found.program.residuals):
        return ""
    kept = sum(stacked_nbytes(*known) for known in found.program.loops) / MIB
    on_host = sum(
        loop.trips * loop.body.nbytes(value) for loop, one in found.program.loops if one for value in one.on_host
    )
    return f", {kept:.0f} MiB kept, {on_host / MIB:.0f} moved"


def rows_of(name: str) -> list[Row]:
    return [Row(**one) for one in json.loads((RESULTS / f"{name}.json").read_text())["rows"]]


def fastest(rows: list[Row], budget: float, memplan: bool) -> Row | None:
    """Of memplan's programs or of the policies, within the budget."""
    fitting = [
        one for one in rows if one.way.startswith("memplan" if memplan else "jax.") and one.device_bytes <= budget
    ]
    return min(fitting, key=lambda one: one.step_s, default=None)


def tables() -> str:
    return "\n".join([*_against_policies(), "", *_programs()]) + "\n"


def _known() -> Iterator[tuple[str, list[Row]]]:
    yield from ((name, rows_of(name)) for name in CASES if (RESULTS / f"{name}.json").exists())


def _against_policies() -> Iterator[str]:
    yield "| device, type | share of plain | plain ms | memplan ms | MiB | best policy that fits | ms |"
    yield "|---|---|---|---|---|---|---|"
    for name, rows in _known():
        for share in SHARES:
            own, policy = (fastest(rows, share * rows[0].device_bytes, memplan) for memplan in (True, False))
            yield (
                f"| {name} | {share:.0%} | {_ms(rows[0])} | {_ms(own)} | {own.device_bytes / MIB:.0f} | " if own else
                f"| {name} | {share:.0%} | {_ms(rows[0])} | none fits | | "
            ) + (f"{policy.way} | {_ms(policy)} |" if policy else "none fits | |")  # fmt: skip


def _programs() -> Iterator[str]:
    yield "| device, type | program | device MiB | predicted | error | host MiB | ms | copies ms | under computation |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for name, rows in _known():
        for one in rows:
            predicted, error = "", ""
            if one.predicted_bytes is not None:
                predicted = f"{one.predicted_bytes / MIB:.0f}"
                error = f"{one.device_bytes / one.predicted_bytes - 1:+.1%}"
            copies = (f"{1e3 * one.copy_s:.1f}", f"{one.hidden_s / one.copy_s:.0%}") if one.copy_s else ("", "")
            cells = (name, one.way, f"{one.device_bytes / MIB:.0f}", predicted, error, f"{one.host_bytes / MIB:.0f}",
                     _ms(one), *copies)  # fmt: skip
            yield f"| {' | '.join(cells)} |"


def _ms(row: Row | None) -> str:
    return f"{1e3 * row.step_s:.1f}" if row else ""


def main() -> None:
    measure_and_tell(__doc__, CASES, lambda name: json.dumps(measure(name), indent=1), README, tables)


if __name__ == "__main__":
    main()
