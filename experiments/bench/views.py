"""What README.md shows of each question: its columns as data, and the sums below."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from statistics import median
from typing import Any

from experiments.bench.cases import WAYS
from experiments.bench.measures.curve import SHARES
from experiments.bench.results import Row
from experiments.bench.tables import MIB, Column, listed, mib, ms, seconds, table
from memplan.hardware.catalog import named
from memplan.report.curve import BOUND, MEMPLAN, XLA

Rows = list[Row]


def _ratio(over: str, under: str) -> Callable[[Row], float | None]:
    """One figure by another; None where either is not known or the second is nothing."""
    return lambda row: row[over] / row[under] if row.get(over) is not None and row.get(under) else None


def more(over: str, under: str) -> Callable[[Row], float | None]:
    def more(row: Row) -> float | None:
        found = _ratio(over, under)(row)
        return None if found is None else found - 1

    return more


def fits(row: Row) -> bool:
    return row["status"] in ("fits", "untouched")


# Steps under budgets.


def missed(row: Row) -> float | None:
    """What the prediction is off by, as a share of the compiler's bytes; None where nothing was planned."""
    return None if row["status"] == "untouched" else more("predicted_bytes", "compiled_bytes")(row)


def slower(row: Row) -> float | None:
    """Share of a plain step's time that the plan adds."""
    return more("step_s", "plain_step_s")(row) if fits(row) else None


def status(row: Row) -> str:
    return row["status"] if row["status"] != "does not fit" else f"does not fit: floor {row['floor_bytes'] / MIB:.0f}"


cost = _ratio("ready_s", "plain_compile_s")
cpu_cost = _ratio("ready_cpu_s", "plain_compile_cpu_s")
_BUDGETS = (
    Column("case", "case"), mib("plain", "plain_bytes"), mib("budget", "budget_bytes"), Column("status", status),
    mib("predicted", "predicted_bytes"), mib("compiled", "compiled_bytes"), mib("host", "host_bytes"),
    ms("plain ms", "plain_step_s"), ms("ms", "step_s"), Column("over plain", slower, "{:+.1%}"),
    Column("compilations", "compilations"), seconds("planning s", "planning_s"), seconds("ready s", "ready_s"),
    seconds("plain compile s", "plain_compile_s"), seconds("cost", cost),
)  # fmt: skip


def budgets(rows: Rows) -> str:
    required = [row for row in rows if row.get("required")]
    others = [row for row in rows if not row.get("required")]
    return "\n\n".join((table(_BUDGETS, required), table(_BUDGETS, others), listed(summary(rows))))


def public(rows: Rows) -> str:
    return "\n\n".join((table(_BUDGETS, rows), listed(summary(rows))))


def summary(rows: Sequence[Row]) -> list[str]:
    """Is the prediction true, what does a plan cost the step, and what does making it cost: one line each."""
    planned, fitting = [row for row in rows if row["status"] != "untouched"], list(filter(fits, rows))
    first = sum(fits(row) and row["compilations"] == 1 for row in planned)
    off = _spread((None if missed(row) is None else abs(missed(row) or 0.0) for row in planned), "{:.2%}")
    over = _spread((slower(row) for row in fitting if row["budget"] == 50), "{:.1%}")
    left = ", ".join(row["case"] for row in rows if not fits(row))
    return [
        f"fits: {len(fitting)} of {len(rows)}" + (f" ({left})" if left else ""),
        f"truth: the prediction is off by {off}; right at the first compilation: {first} of {len(planned)}",
        f"time over plain at 50 %: {over}",
        f"cost in plain compilations: by the clock {_spread(map(cost, rows))}; in seconds of all threads "
        f"{_spread(map(cpu_cost, rows))}",
        f"compilations: {_spread(row.get('compilations') for row in planned)}",
    ]


def _spread(numbers: Iterable[float | None], shown: str = "{:.1f}") -> str:
    """Median, 90th percentile and the largest of those that are known."""
    ordered = sorted(number for number in numbers if number is not None)
    if not ordered:
        return "not measured"
    nine_tenths = ordered[min(len(ordered) - 1, 9 * len(ordered) // 10)]
    middle, high, worst = (shown.format(one) for one in (median(ordered), nine_tenths, ordered[-1]))
    return f"median {middle}, 90th percentile {high}, worst {worst}"


def size(rows: Rows) -> str:
    return table(
        (
            Column("batch", "batch"), Column("budget", "budget"), mib("jax.jit MiB", "plain_bytes"),
            mib("unmodified MiB", "unmodified_bytes"),
            Column("chosen", lambda row: row["planner"] if fits(row) else status(row)),
            mib("device MiB", "compiled_bytes"), mib("host MiB", "host_bytes"), ms("step ms", "step_s"),
            Column("images/s", _ratio("batch", "step_s"), "{:.0f}"),
        ),
        rows,
    )  # fmt: skip


def links(rows: Rows) -> str:
    def bandwidth(row: Row) -> float | None:
        return named(row["device"]).link.bandwidth if "@" in row["device"] else None

    return table(
        (
            Column("link", "case"), Column("GB/s", bandwidth, "{:.1f}", 1e9), mib("device MiB", "compiled_bytes"),
            Column("kernels again", "again"), mib("to the host MiB", "offloaded_bytes"),
            ms("copies ms", "copy_s", "{:.0f}"),
            Column("under computation", _ratio("hidden_copy_s", "copy_s"), "{:.0%}"),
            ms("step ms", "step_s"), Column("over plain", more("step_s", "plain_step_s"), "{:+.1%}"),
        ),
        rows,
    )  # fmt: skip


def state(rows: Rows) -> str:
    return table(
        (
            Column("case", "case"), mib("state MiB", "state_bytes"), mib("jax.jit MiB", "plain_bytes"),
            mib("unmodified MiB", "unmodified_bytes"),
            Column("budget", "budget"), Column("chosen", "planner"), mib("device MiB", "compiled_bytes"),
            mib("predicted", "predicted_bytes"), mib("host MiB", "host_bytes"),
            ms("plain ms", "plain_step_s", "{:.0f}"), ms("ms", "step_s", "{:.0f}"), ms("copies ms", "copy_s", "{:.0f}"),
            Column("under computation", _ratio("hidden_copy_s", "copy_s"), "{:.0%}"),
            ms("stalled ms", "stall_s", "{:.0f}"),
        ),
        rows,
    )  # fmt: skip


# Loops: memplan's residuals against the policies of jax.checkpoint.


def loops(rows: Rows) -> str:
    off = more("compiled_bytes", "predicted_bytes")
    against = (
        Column("device, type", "of"), Column("share of plain", "share", "{:.0%}"), ms("plain ms", "plain_s"),
        ms("memplan ms", "step_s"), mib("MiB", "compiled_bytes"), Column("best policy that fits", "policy"),
        ms("ms", "policy_s"),
    )  # fmt: skip
    programs = (
        Column("device, type", "of"), Column("program", _program), mib("device MiB", "compiled_bytes"),
        mib("predicted", lambda row: row["predicted_bytes"] if row["budget"] else None),
        Column("error", lambda row: off(row) if row["budget"] else None, "{:+.1%}"),
        mib("host MiB", "host_bytes"), ms("ms", "step_s"), ms("copies ms", lambda row: row["copy_s"] or None),
        Column("under computation", _ratio("hidden_copy_s", "copy_s"), "{:.0%}"),
    )  # fmt: skip
    same = [list(found) for _, found in groupby(rows, lambda row: row["of"])]
    return "\n\n".join((table(against, (row for found in same for row in _against(found))), table(programs, rows)))


def _program(row: Row) -> str:
    if row["budget"] is None:
        return f"jax.checkpoint, {row['policy']}" if "policy" in row else "plain"
    if row["stacked_bytes"] is None:
        return f"memplan within {row['budget']}%"
    kept, moved = row["stacked_bytes"] / MIB, row["moved_bytes"] / MIB
    return f"memplan within {row['budget']}%, {kept:.0f} MiB kept, {moved:.0f} moved"


def _against(rows: Rows) -> Iterator[Row]:
    """memplan's fastest program within each share, and the fastest policy's."""
    plain = next((row for row in rows if row["budget"] is None and "policy" not in row), None)
    if plain is None:
        return
    for share in (0.5, 0.3, 0.2):
        fitting = [row for row in rows if row["compiled_bytes"] <= share * plain["compiled_bytes"]]
        own = _fastest(row for row in fitting if row["budget"] is not None)
        policy = _fastest(row for row in fitting if "policy" in row)
        yield {
            "of": plain["of"], "share": share, "plain_s": plain["step_s"], "step_s": own.get("step_s"),
            "compiled_bytes": own.get("compiled_bytes"), "policy_s": policy.get("step_s"),
            "policy": _program(policy) if policy else "none fits",
        }  # fmt: skip


def _fastest(rows: Iterable[Row]) -> Row:
    return min(rows, key=lambda row: row["step_s"], default={})


# The same bits.


def same_bits(rows: Rows) -> str:
    def share(row: Row) -> str:
        return f"{row['percent']} %" + (f" (for {row['asked']})" if row["percent"] != row["asked"] else "")

    def verdict(row: Row) -> str:
        wrong = f"{len(row['unequal'])} arrays differ" if row["unequal"] else "equal"
        return "by the gate" if row["gated"] else wrong

    return table(
        (
            Column("step", "case"), Column("share", share),
            Column("KiB of plain's", lambda row: f"{row['compiled_bytes'] // 1024} of {row['plain_bytes'] // 1024}"),
            Column("kernels again", "again"), Column("arrays a step", "outputs"), Column("steps", "steps"),
            Column("bits", verdict),
        ),
        (row for row in rows if "asked" in row),
    )  # fmt: skip


def drawn(rows: Rows) -> str:
    return listed(
        f"{row['steps']} steps drawn at random: {row['plans']} plans, {row['with_kernels_again']} of them with kernels "
        f"that run again, {row['kernels_again']} in all; of {row['arrays']} arrays "
        f"{sum(map(len, row['unequal'].values()))} differ."
        for row in rows
        if "plans" in row
    )


# memplan against what JAX users have today.

_RIVALS = (
    Column("step", "case"), Column("share", "share", "{:.0%}"), ms("plain ms", "plain_s"),
    Column("memplan ms", lambda row: _told(row["own_s"])), Column("over plain", more("own_s", "plain_s"), "{:+.1%}"),
    Column("XLA ms", lambda row: _told(row["xla_s"])),
    Column("best policy that fits, ms", lambda row: _told(row["policy_s"]) + row["policy"]),
    ms("bound ms", "bound_s"),
)  # fmt: skip


def rivals(rows: Rows) -> str:
    found = [one for case, points in groupby(rows, lambda row: row["case"]) for one in comparisons(case, list(points))]
    return "\n\n".join((table(_RIVALS, found), listed(rival_sums(found))))


def comparisons(case: str, points: Rows) -> Iterator[Row]:
    """One for each budget, largest first; seconds of each way that fits, None where none does."""
    plain = points[0]
    for share in SHARES:
        budget = int(share * plain["device_bytes"])
        at = {point["way"]: point["step_s"] for point in points if point["budget_bytes"] == budget}
        unplanned = (point for point in points if point["budget_bytes"] is None and point["step_s"])
        policy = _fastest(point for point in unplanned if (point["device_bytes"] or 0) <= budget)
        told = f" ({policy['way'].partition(', ')[2]})" if policy else ""
        yield {
            "case": case, "share": share, "plain_s": plain["step_s"], "own_s": at[MEMPLAN], "xla_s": at[XLA],
            "policy_s": policy.get("step_s"), "policy": told, "bound_s": at[BOUND] or 0.0,
        }  # fmt: skip


def _told(seconds_: float | None) -> str:
    return "none fits" if seconds_ is None else f"{1e3 * seconds_:.1f}"


def rival_sums(rows: Sequence[Row]) -> Iterator[str]:
    solved = [row for row in rows if row["own_s"] is not None]
    against = [row for row in rows if row["xla_s"] is not None]
    rivalled = [row for row in rows if _rival(row) < math.inf]
    policies = sum(row["policy_s"] is not None for row in rows)
    yield (
        f"{len(solved)} of {len(rows)} cases have a plan of memplan's own that fits; XLA's own fits in {len(against)}, "
        f"a policy in {policies}."
    )
    best = sum(_own(row) <= _rival(row) for row in rivalled)
    yield f"In {best} of the {len(rivalled)} cases where any rival fits, memplan's own plan is at least as fast."
    ahead, alone = sum(_own(row) < row["xla_s"] for row in against), sum(row["xla_s"] is None for row in solved)
    yield (
        f"In {ahead} of the {len(against)} cases where XLA's own fits, memplan's own plan is faster; in {alone} more, "
        "XLA's own does not fit."
    )
    halves = [_own(row) / row["plain_s"] - 1 for row in solved if row["share"] == 0.5]
    if halves:
        yield f"Median overhead at 50 %: {median(halves):.1%} over {len(halves)} steps."
    if solved:
        gap = median(_own(row) / row["bound_s"] - 1 for row in solved)
        fastest = ((row["bound_s"], min(_own(row), _rival(row))) for row in rows)
        below = sum(found < bound and not math.isclose(found, bound) for bound, found in fastest)
        yield f"Median distance to the bound: {gap:.1%}; programs that are below it: {below}."


def _own(row: Row) -> float:
    return math.inf if row["own_s"] is None else row["own_s"]


def _rival(row: Row) -> float:
    return min((found for found in (row["xla_s"], row["policy_s"]) if found is not None), default=math.inf)


# Sizes.


def large_images(rows: Rows) -> str:
    def pixels(row: Row) -> float | None:
        return row["growth"].pixels(row["size"]) if row.get("size") else None

    def speed_(row: Row) -> float:
        return row["growth"].pixels(row["size"]) / row["step_s"] / 1e6

    def compared(found: dict[str, Row]) -> Row:
        own, plain, checkpoint = (pixels(found[way]) if way in found else None for way in (WAYS[3], WAYS[0], WAYS[1]))
        first = next(iter(found.values()))
        return {
            **first, **{way: one.get("size") for way, one in found.items()}, "own": own, "plains": plain,
            "checkpoints": checkpoint, "limit": found[WAYS[3]].get("limit") if WAYS[3] in found else None,
        }  # fmt: skip

    sizes = (
        Column("largest", "of"), Column("device", "device"), *(Column(way, way) for way in WAYS),
        Column("pixels, plain's", _ratio("own", "plains"), "{:.1f}x"),
        Column("jax.checkpoint's", _ratio("own", "checkpoints"), "{:.1f}x"), Column("what refuses the next", "limit"),
    )  # fmt: skip
    there = (
        Column("largest", "of"), Column("device", "device"), Column("way", "way"), Column("size", "size"),
        mib("device MiB", "compiled_bytes"), mib("host MiB", "host_bytes"), ms("step ms", "step_s", "{:.0f}"),
        Column("Mpixel/s", speed_, "{:.1f}"),
    )  # fmt: skip
    same = groupby(rows, lambda row: (row["of"], row["device"]))
    by_way = [{row["way"]: row for row in found} for _, found in same]
    return "\n\n".join((table(sizes, map(compared, by_way)), table(there, (row for row in rows if row.get("size")))))


def speed(rows: Rows) -> str:
    def mpixels(seconds_: str, nbytes: str) -> Callable[[Row], float | None]:
        def found(row: Row) -> float | None:
            return row["pixels"] / row[seconds_] / 1e6 if row[nbytes] <= row["budget_bytes"] else None

        return found

    return table(
        (
            Column("speed", "of"), Column("device", "device"), Column("size", "size"),
            Column("jax.jit Mpixel/s", mpixels("jit_step_s", "plain_bytes"), "{:.1f}"),
            Column("jax.checkpoint", mpixels("checkpoint_step_s", "checkpoint_bytes"), "{:.1f}"),
            Column("memplan", mpixels("step_s", "compiled_bytes"), "{:.1f}"),
            mib("its device MiB", "compiled_bytes"), mib("its host MiB", "host_bytes"),
        ),
        filter(fits, rows),
    )  # fmt: skip


def largest(rows: Rows) -> str:
    return table(
        (
            Column("sizes", lambda row: f"{row['case']} {row['low']} to {row['high']}"), Column("budget", "budget"),
            Column("largest", "largest"), Column("of every size", "of_every_size"), Column("traced", "traced"),
            Column("compiled programs", "compilations"), Column("s", "seconds", "{:.0f}"),
            Column("s for every size", "every_size_s", "{:.0f}"),
        ),
        rows,
    )  # fmt: skip


# Many devices, simulated.


def scaling(rows: Rows) -> str:
    def hidden(row: Row) -> float:
        return row["hidden_collective_s"] / row["collective_s"] if row["collective_s"] else 1.0

    published = (
        Column("at 64 x 4 P100", lambda row: row["published"][0]),
        Column("published by DDL", lambda row: row["published"][1], "{:.0%}"),
        Column("replayed", "efficiency", "{:.1%}"),
    )  # fmt: skip
    scaled = (
        Column("case", "case"), Column("statistics of the batch", "statistics"),
        Column("compiled for", "compiled_shape"), mib("device MiB", "compiled_bytes"), ms("one device ms", "single_s"),
        Column("devices", "devices"), ms("step ms", "step_s"), ms("collectives ms", "collective_s"),
        Column("hidden", hidden, "{:.0%}"), Column("efficiency", "efficiency", "{:.1%}"),
    )  # fmt: skip
    at_256 = [row for row in rows if "published" in row and row["devices"] == 256]
    return "\n\n".join(
        (table(published, at_256), table(scaled, [row for row in rows if row["devices"] in (16, 256, 4096)]))
    )


# On the device that is here.


def overhead(rows: Rows) -> str:
    def shown(name: str) -> Callable[[Row], Any]:
        return lambda row: f"{row[name] / row['unit_s']:.4g} {'s' if row['unit_s'] == 1 else 'us'}"

    return table(
        (
            Column("", "what"), Column("jax.jit", shown("jax_s")), Column("memplan.jit", shown("memplan_s")),
            Column("ratio", _ratio("memplan_s", "jax_s"), "{:.3f}"),
        ),
        rows,
    )  # fmt: skip
