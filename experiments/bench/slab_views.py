"""What README.md shows of the questions about slabs."""

from __future__ import annotations

from statistics import mean

from experiments.bench.results import Row
from experiments.bench.tables import Column, listed, mib, ms, table
from experiments.bench.views import fits, more, status

Rows = list[Row]


def slabs(rows: Rows) -> str:
    def rate(row: Row) -> str:
        return f"{row['samples'] / row['step_s']:.4g} {row['of']}" if fits(row) else ""

    return table(
        (
            Column("case", "case"), mib("jax.jit MiB", "plain_bytes"), mib("unmodified MiB", "unmodified_bytes"),
            Column("chosen", lambda row: row["planner"] if fits(row) else status(row)),
            Column("loops", "slab_loops"), mib("device MiB", "compiled_bytes"), mib("host MiB", "host_bytes"),
            ms("step ms", "step_s", "{:.0f}"), ms("unmodified ms", "plain_step_s", "{:.0f}"), Column("a second", rate),
            Column("ready s", "ready_s", "{:.0f}"),
        ),
        rows,
    )  # fmt: skip


def slab_time(rows: Rows) -> str:
    return table(
        (
            Column("case", "case"), Column("slabs", lambda row: row["slabs"] if row["slabs"] > 1 else "none"),
            Column("rows", "rows"), Column("operations in them", "ops"), mib("device MiB", "compiled_bytes"),
            ms("step ms", "step_s"), Column("over plain", more("step_s", "plain_step_s"), "{:+.1%}"),
        ),
        rows,
    )  # fmt: skip


def resident(rows: Rows) -> str:
    def losses(row: Row) -> str:
        return ", ".join(f"{loss:.6f}" for loss in row["losses"])

    return table(
        (
            Column("case", "case"), mib("machine MiB", "machine_bytes"), mib("jax.jit MiB", "plain_bytes"),
            mib("budget MiB", "budget_bytes"), mib("compiled MiB", "compiled_bytes"), Column("loops", "slab_loops"),
            mib("resident set MiB", "peak_rss"), Column("losses", losses),
            Column("s a step", lambda row: mean(row["seconds"]), "{:.0f}"),
            Column("s of all threads", lambda row: mean(row["cpu_seconds"]), "{:.0f}"),
            Column("ready s", "ready_s", "{:.0f}"),
        ),
        [row for row in rows if "losses" in row],
    )  # fmt: skip


def numbers(rows: Rows) -> str:
    return table(
        (
            Column("step", "case"), Column("in slabs of", lambda row: f"{row['face'].rows} rows, {row['face'].axis}"),
            Column("written", "written"), Column("loops", "loops"), *_beside("loss"), *_beside("parameters"),
            Column("worst array", "worst_array", "{:.2f}"),
        ),
        [row for row in rows if "written" in row],
    )  # fmt: skip


def _beside(name: str) -> tuple[Column, ...]:
    """A difference, what recompilation alone does, and the first by the greater of those."""
    return (
        Column(name, name, "{:.0e}"), Column("pieces", f"pieces_{name}", "{:.0e}"),
        Column("ulp", f"ulp_{name}", "{:.0e}"),
        Column("ratio", lambda row: row[name] / max(row[f"pieces_{name}"], row[f"ulp_{name}"]), "{:.2f}"),
    )  # fmt: skip


def aborts(rows: Rows) -> str:
    rows = [row for row in rows if "steps" in row]
    totals = (sum(row[name] for row in rows) for name in ("steps", "loops", "plans", "plans_in_slabs"))
    steps, loops, plans, in_slabs = totals
    wrong = {number: what for row in rows for number, what in row["wrong"].items()}
    said = f"{steps} steps drawn at random, {loops} loops over slabs, {plans} plans, of which {in_slabs} have slabs"
    return listed([f"{said}; wrong: {wrong or 'none'}."] if rows else [])


def judged(rows: Rows) -> str:
    return table(
        (
            Column("step and device", "case"), Column("plans that fit", "plans"), Column("in slabs", "in_slabs"),
            Column("loops rewritten", "with_loops"), Column("budget too small", "too_small"),
            Column("wrong", lambda row: "; ".join(map(": ".join, row["wrong"].items())) or "none"),
        ),
        [row for row in rows if "plans" in row],
    )  # fmt: skip
