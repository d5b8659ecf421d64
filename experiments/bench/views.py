"""What README.md shows for each question: columns as data, and sums."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from statistics import linear_regression, mean, median

from experiments.bench.cases import METHODS
from experiments.bench.measures.by_hand import MORE, SAVES_NOTHING
from experiments.bench.measures.curve import SHARES
from experiments.bench.measures.inside import MORE_BYTES, MORE_SECONDS
from experiments.bench.results import Row, stored_result
from experiments.bench.tables import MIB, Column, Rows, having, listed, mib, ms, shown, table
from memplan.hardware.catalog import named
from memplan.report.curve import BOUND, MEMPLAN, XLA


def _ratio(over: str, under: str) -> Callable[[Row], float | None]:
    """One figure over another; None if either is unknown or the second is zero."""
    return lambda row: (
        row[over] / row[under] if row.get(over) is not None and row.get(under) else None
    )


def more(over: str, under: str) -> Callable[[Row], float | None]:
    """The excess of one figure over another, as a share."""
    ratio = _ratio(over, under)
    return lambda row: None if (quotient := ratio(row)) is None else quotient - 1


def fits(row: Row) -> bool:
    return row["status"] in ("fits", "untouched")


def status(row: Row) -> str:
    return (
        row["status"]
        if row["status"] != "does not fit"
        else f"does not fit: floor {row['floor_bytes'] / MIB:.0f}"
    )


_CASE, _STEP, _DEVICE = Column("case", "case"), Column("step", "case"), Column("device", "device")
_BUDGET = Column("budget", "budget")
_CHOSEN = Column("chosen", lambda row: row["planner"] if fits(row) else status(row))
_JIT, _UNMODIFIED = mib("jax.jit MiB", "plain_bytes"), mib("unmodified MiB", "unmodified_bytes")
_DEVICE_MIB, _HOST_MIB, _PREDICTED = (
    mib("device MiB", "compiled_bytes"), mib("host MiB", "host_bytes"),
    mib("predicted", "predicted_bytes"),
)  # fmt: skip
_STEP_MS = ms("step ms", "step_s")
_OVER_PLAIN = Column("over plain", more("step_s", "plain_step_s"), "{:+.1%}")
_UNDER = Column("under computation", _ratio("hidden_copy_s", "copy_s"), "{:.0%}")

# Steps under budgets.


def missed(row: Row) -> float | None:
    """The prediction's error as a share of the compiler's bytes; None: nothing was planned."""
    return None if row["status"] == "untouched" else more("predicted_bytes", "compiled_bytes")(row)


def slower(row: Row) -> float | None:
    """The time that the plan adds, as a share of the plain step's."""
    return more("step_s", "plain_step_s")(row) if fits(row) else None


cost = _ratio("ready_s", "plain_compile_s")
cpu_cost = _ratio("ready_cpu_s", "plain_compile_cpu_s")
_BUDGETS = (
    _CASE, mib("plain", "plain_bytes"), mib("budget", "budget_bytes"), Column("status", status),
    _PREDICTED,
    mib("compiled", "compiled_bytes"), mib("host", "host_bytes"), ms("plain ms", "plain_step_s"),
    ms("ms", "step_s"),
    Column("over plain", slower, "{:+.1%}"), Column("compilations", "compilations"),
    Column("planning s", "planning_s", "{:.1f}"), Column("ready s", "ready_s", "{:.1f}"),
    Column("plain compile s", "plain_compile_s", "{:.1f}"), Column("cost", cost, "{:.1f}"),
)  # fmt: skip


def budgets(rows: Rows) -> str:
    parts = (
        [row for row in rows if bool(row.get("required")) is required] for required in (True, False)
    )
    return "\n\n".join((*(table(_BUDGETS, part) for part in parts), listed(summary(rows))))


tpu = shown(
    _CASE, Column("share", "share", "{} %"), Column("planned by", "planner"),
    mib("plain MiB", "plain_bytes"),
    mib("budget MiB", "budget_bytes"), mib("named MiB", "named_bytes"),
    mib("predicted MiB", "predicted_bytes"), mib("compiled MiB", "compiled_bytes"),
    Column("off", more("predicted_bytes", "compiled_bytes"), "{:+.1%}"),
    mib("on the host MiB", "host_bytes"), Column("compilations", "compilations"),
    Column("over plain", more("step_s", "plain_step_s"), "{:+.1%}"),
    mib("least by XLA's own MiB", "xla_least_bytes"),
    mib("jax.checkpoint MiB", "checkpoint_bytes"),
    Column("exploring, of a plain compilation",
        lambda row: row["explored_cpu_s"] / row["plain_compile_cpu_s"], "{:.1%}"),
)  # fmt: skip


clocks = shown(
    _CASE, Column("planned by", "planned_by"), mib("on the host MiB", "host_bytes"),
    Column("GFLOP again", "again_flops", "{:.0f}", 1e9),
    Column("over plain by the roofline", "over_by_roofline", "{:+.1%}"),
    Column("over plain by classes", "over_by_classes", "{:+.1%}"),
)  # fmt: skip


def public(rows: Rows) -> str:
    return "\n\n".join((table(_BUDGETS, rows), listed(summary(rows))))


def summary(rows: Sequence[Row]) -> list[str]:
    """Lines on the prediction's error, the plan's cost in time, and the cost of planning."""
    planned = [row for row in rows if row["status"] != "untouched"]
    fitting = list(filter(fits, rows))
    first = sum(fits(row) and row["compilations"] == 1 for row in planned)
    off = _spread((abs(off) for row in planned if (off := missed(row)) is not None), "{:.2%}")
    over = _spread((slower(row) for row in fitting if row["budget"] == 50), "{:.1%}")
    unfitting = ", ".join(row["case"] for row in rows if not fits(row))
    return [
        f"fits: {len(fitting)} of {len(rows)}" + (f" ({unfitting})" if unfitting else ""),
        f"truth: the prediction is off by {off}; right at the first compilation: {first} of "
        f"{len(planned)}",
        f"time over plain at 50 %: {over}",
        f"cost in plain compilations: by the clock {_spread(map(cost, rows))}; in seconds of all "
        "threads "
        f"{_spread(map(cpu_cost, rows))}",
        f"compilations: {_spread(row.get('compilations') for row in planned)}",
    ]


def _spread(numbers: Iterable[float | None], shown: str = "{:.1f}") -> str:
    """Median, 90th percentile and largest of the known numbers."""
    ordered = sorted(number for number in numbers if number is not None)
    if not ordered:
        return "not measured"
    nine_tenths = ordered[min(len(ordered) - 1, 9 * len(ordered) // 10)]
    middle, high, worst = (
        shown.format(number) for number in (median(ordered), nine_tenths, ordered[-1])
    )
    return f"median {middle}, 90th percentile {high}, worst {worst}"


size = shown(
    Column("batch", "batch"), _BUDGET, _JIT, _UNMODIFIED, _CHOSEN, _DEVICE_MIB, _HOST_MIB, _STEP_MS,
    Column("images/s", _ratio("batch", "step_s"), "{:.0f}"),
)  # fmt: skip
links = shown(
    Column("link", "case"),
    Column("GB/s",
        lambda row: named(row["device"]).link.bandwidth if "@" in row["device"] else None, "{:.1f}",
            1e9),
    _DEVICE_MIB, Column("kernels again", "again"), mib("to the host MiB", "offloaded_bytes"),
    ms("copies ms", "copy_s", "{:.0f}"), _UNDER, _STEP_MS, _OVER_PLAIN,
)  # fmt: skip
state = shown(
    _CASE, mib("state MiB", "state_bytes"), _JIT, _UNMODIFIED, _BUDGET, Column("chosen", "planner"),
    _DEVICE_MIB,
    _PREDICTED, _HOST_MIB, ms("plain ms", "plain_step_s", "{:.0f}"), ms("ms", "step_s", "{:.0f}"),
    ms("copies ms", "copy_s", "{:.0f}"), _UNDER, ms("stalled ms", "stall_s", "{:.0f}"),
)  # fmt: skip

# Slabs.

slabs = shown(
    _CASE, _JIT, _UNMODIFIED, _CHOSEN, Column("loops", "slab_loops"), _DEVICE_MIB, _HOST_MIB,
    ms("step ms", "step_s", "{:.0f}"), ms("unmodified ms", "plain_step_s", "{:.0f}"),
    Column("a second",
        lambda row: f"{row['samples'] / row['step_s']:.4g} {row['of']}" if fits(row) else ""),
    Column("ready s", "ready_s", "{:.0f}"),
)  # fmt: skip
slab_time = shown(
    _CASE, Column("slabs", lambda row: row["slabs"] if row["slabs"] > 1 else "none"),
    Column("rows", "rows"),
    Column("operations in them", "ops"), _DEVICE_MIB, _STEP_MS, _OVER_PLAIN,
)  # fmt: skip
resident = shown(
    _CASE, mib("machine MiB", "machine_bytes"), _JIT, mib("budget MiB", "budget_bytes"),
    mib("compiled MiB", "compiled_bytes"), Column("loops", "slab_loops"),
    mib("resident set MiB", "peak_rss"),
    Column("losses", lambda row: ", ".join(f"{loss:.6f}" for loss in row["losses"])),
    Column("s a step", lambda row: mean(row["seconds"]), "{:.0f}"),
    Column("s of all threads", lambda row: mean(row["cpu_seconds"]), "{:.0f}"),
    Column("ready s", "ready_s", "{:.0f}"),
    of=having("losses"),
)  # fmt: skip


def _beside(name: str) -> tuple[Column, ...]:
    """An error, the two errors of recompilation alone, and the ratio to the larger of these."""
    return (
        Column(name, name, "{:.0e}"), Column("pieces", f"pieces_{name}", "{:.0e}"),
        Column("ulp", f"ulp_{name}", "{:.0e}"),
        Column("ratio", lambda row: row[name] / max(row[f"pieces_{name}"], row[f"ulp_{name}"]),
            "{:.2f}"),
    )  # fmt: skip


numbers = shown(
    _STEP, Column("in slabs of", lambda row: f"{row['face'].rows} rows, {row['face'].axis}"),
    Column("written", "written"), Column("loops", "loops"), *_beside("loss"),
    *_beside("parameters"),
    Column("worst array", "worst_array", "{:.2f}"), of=having("written"),
)  # fmt: skip
judged = shown(
    Column("step and device", "case"), Column("plans that fit", "plans"),
    Column("in slabs", "in_slabs"),
    Column("loops rewritten", "with_loops"), Column("budget too small", "too_small"),
    Column("wrong", lambda row: "; ".join(map(": ".join, row["wrong"].items())) or "none"),
    of=having("plans"),
)  # fmt: skip


def aborts(rows: Rows) -> str:
    rows = having("steps")(rows)
    steps, loops, plans, in_slabs = (
        sum(row[name] for row in rows) for name in ("steps", "loops", "plans", "plans_in_slabs")
    )
    wrong = {number: error for row in rows for number, error in row["wrong"].items()}
    said = (
        f"{steps} steps drawn at random, {loops} loops over slabs, {plans} plans, "
        f"of which {in_slabs} have slabs"
    )
    return listed([f"{said}; wrong: {wrong or 'none'}."] if rows else [])


# Loops: memplan's residuals against the policies of jax.checkpoint.


_off = more("compiled_bytes", "predicted_bytes")


def loops(rows: Rows) -> str:
    against = (
        Column("device, type", "of"), Column("share of plain", "share", "{:.0%}"),
        ms("plain ms", "plain_s"),
        ms("memplan ms", "step_s"), mib("MiB", "compiled_bytes"),
        Column("best policy that fits", "policy"),
        ms("ms", "policy_s"),
    )  # fmt: skip
    programs = (
        Column("device, type", "of"), Column("program", _program), _DEVICE_MIB,
        mib("predicted", lambda row: row["predicted_bytes"] if row["budget"] else None),
        Column("error", lambda row: _off(row) if row["budget"] else None, "{:+.1%}"),
        _HOST_MIB, ms("ms", "step_s"), ms("copies ms", lambda row: row["copy_s"] or None), _UNDER,
    )  # fmt: skip
    same = [list(group) for _, group in groupby(rows, lambda row: row["of"])]
    return "\n\n".join(
        (table(against, (row for group in same for row in _against(group))), table(programs, rows))
    )


long_scans = shown(
    _CASE, mib("plain MiB", "plain_bytes"), ms("plain ms", "jit_step_s"),
    mib("budget MiB", "budget_bytes"),
    mib("memplan MiB", "compiled_bytes"), _HOST_MIB, ms("memplan ms", "step_s"),
    Column("jax.checkpoint, trips of a segment", "nested_trips"), mib("MiB", "nested_bytes"),
    ms("ms", "nested_step_s"),
    Column("forward trips run", "trips_run"), Column("by revolve", "revolve_trips"),
    Column("s to plan", "planning_s", "{:.1f}"), of=lambda rows: filter(fits, rows),
)  # fmt: skip

_INSIDE = (
    Column("network", "network"), _DEVICE, Column("form", "form"),
    Column("share of plain", "share", "{} %"),
    Column("status", "status"), Column("plain bytes over straight's", "plain_ratio", "{:.3f}"),
    mib("straight's budget MiB", "room_bytes"), mib("the wrapper adds MiB", "added_bytes"),
    Column("bytes over that", "bytes_ratio", "{:.3f}"), ms("ms of a trip", "step_s"),
    Column("ms over straight", "seconds_ratio", "{:.3f}"), Column("way", "way"),
    Column("kernels again", "again"),
    mib("to the host MiB", "offloaded_bytes"), Column("loops in slabs", "slab_loops"),
)  # fmt: skip


def inside(rows: Rows) -> str:
    wrapped = [row for row in having("form")(rows) if row["form"] != "straight"]
    forms = dict.fromkeys(row["form"] for row in wrapped)
    of_all = (
        f"{form}: {_reached(row for row in wrapped if row['form'] == form)}" for form in forms
    )
    goal = f"within {MORE_BYTES:.0%} of the bytes and {MORE_SECONDS:.0%} of the seconds"
    return "\n\n".join(
        (table(_INSIDE, having("form")(rows)), listed([f"{goal}: {_reached(wrapped)}", *of_all]))
    )


def _reached(rows: Iterable[Row]) -> str:
    reached = [
        fits(row)
        and row["bytes_ratio"] <= 1 + MORE_BYTES
        and row["seconds_ratio"] <= 1 + MORE_SECONDS
        for row in rows
    ]
    return f"{sum(reached)} of {len(reached)}"


# Plans beside what a user writes by hand.

_BESIDE_BY_HAND = (
    mib("plain", "plain_bytes"), mib("by hand", "hand_bytes"),
    Column("memplan", lambda row: _bytes_or_least(row)), ms("plain ms", "plain_step_s"),
    ms("by hand ms", "hand_step_s"), ms("ms", "step_s"),
    Column("over by hand", more("step_s", "hand_step_s"), "{:+.1%}"),
    Column("plain compile CPU s", "plain_cpu_s", "{:.1f}"),
    Column("planned CPU s", "planned_cpu_s", "{:.1f}"), Column("law", "law"),
)  # fmt: skip
_BY_HAND = (
    _CASE, Column("boundaries, from the outside in", "recipe"),
    Column("layers", lambda row: f"{row['recipe'].layers} {row['recipe'].layer}"),
    *_BESIDE_BY_HAND, Column("numbers", "numbers"),
)  # fmt: skip


def _bytes_or_least(row: Row) -> str | None:
    """The planned bytes, or the fewest bytes of any plan if none fits."""
    if row["law"] == "refused":
        return f"at least {row['smallest_bytes'] / MIB:.0f}"
    return f"{row['compiled_bytes'] / MIB:.0f}" if "compiled_bytes" in row else None


def by_hand(rows: Rows) -> str:
    """The rows that break the law, and how many hold it: by place, by boundary, by what breaks it.

    Of all rows, the seconds over those by hand, and the CPU seconds of planning over compiling.
    """
    over, planning = more("step_s", "hand_step_s"), _ratio("planned_cpu_s", "plain_cpu_s")
    measured = having("law")(rows)
    saving = [row for row in measured if _saves(row)]
    others = [row for row in measured if not _saves(row)]
    laws = dict.fromkeys(row["law"] for row in measured if row["law"] != "holds")
    places = dict.fromkeys(row["place"] for row in measured)
    kinds = sorted({str(boundary) for row in saving for boundary in row["recipe"].boundaries})
    return "\n\n".join((
        table(_BY_HAND, [row for row in measured if row["law"] != "holds"]),
        listed([
            f"milliseconds over by hand: {_spread(map(over, saving), '{:+.1%}')}",
            f"CPU seconds, planned over compiled: {_spread(map(planning, measured))}",
            f"within {MORE - 1:.0%} of the bytes and seconds by hand: {_holding(saving)}; where "
            f"that saves less than {1 - SAVES_NOTHING:.0%}: {_holding(others)}",
            *(f"{law}: {', '.join(row['case'] for row in measured if row['law'] == law)}"
              for law in laws),
            *(f"{place}: {_holding(row for row in saving if row['place'] == place)}"
              for place in places),
        ]),
        "By boundary, of the programs in which that by hand saves bytes:",
        listed(
            f"{kind}: {_holding(row for row in saving if kind in _boundaries(row))}"
            for kind in kinds
        ),
    ))  # fmt: skip


def by_hand_alone(rows: Rows) -> str:
    """Every row."""
    return table((_CASE, Column("device", _device_of), *_BESIDE_BY_HAND), having("law")(rows))


def _device_of(row: Row) -> str:
    return row["device"] + ("" if row["topology"] is None else f", {row['topology']}")


def _boundaries(row: Row) -> list[str]:
    return [str(boundary) for boundary in row["recipe"].boundaries]


def _saves(row: Row) -> bool:
    """Whether the version by hand takes fewer bytes; if it is unknown, it may."""
    return row.get("hand_bytes", 0) < SAVES_NOTHING * row.get("plain_bytes", 1)


def _holding(rows: Iterable[Row]) -> str:
    laws = [row["law"] for row in rows]
    return f"{laws.count('holds')} of {len(laws)}"


def _program(row: Row) -> str:
    if row["budget"] is None:
        return f"jax.checkpoint, {row['policy']}" if "policy" in row else "plain"
    if row["stacked_bytes"] is None:
        return f"memplan within {row['budget']}%"
    kept, moved = row["stacked_bytes"] / MIB, row["moved_bytes"] / MIB
    return f"memplan within {row['budget']}%, {kept:.0f} MiB kept, {moved:.0f} moved"


def _against(rows: Rows) -> Iterator[Row]:
    """The fastest program of memplan and the fastest policy within each share."""
    plain = next((row for row in rows if row["budget"] is None and "policy" not in row), None)
    if plain is None:
        return
    for share in (0.5, 0.3, 0.2):
        fitting = [row for row in rows if row["compiled_bytes"] <= share * plain["compiled_bytes"]]
        own = _fastest(row for row in fitting if row["budget"] is not None)
        policy = _fastest(row for row in fitting if "policy" in row)
        yield {
            "of": plain["of"], "share": share, "plain_s": plain["step_s"],
            "step_s": own.get("step_s"),
            "compiled_bytes": own.get("compiled_bytes"), "policy_s": policy.get("step_s"),
            "policy": _program(policy) if policy else "none fits",
        }  # fmt: skip


def _fastest(rows: Iterable[Row]) -> Row:
    return min(rows, key=lambda row: row["step_s"], default={})


# The same bits.


def _share(row: Row) -> str:
    return f"{row['percent']} %" + (
        f" (for {row['asked']})" if row["percent"] != row["asked"] else ""
    )


def _verdict(row: Row) -> str:
    wrong = f"{len(row['unequal'])} arrays differ" if row["unequal"] else "equal"
    return "by the gate" if row["gated"] else wrong


same_bits = shown(
    _STEP, Column("share", _share),
    Column("KiB of plain's",
        lambda row: f"{row['compiled_bytes'] // 1024} of {row['plain_bytes'] // 1024}"),
    Column("kernels again", "again"), Column("arrays a step", "outputs"), Column("steps", "steps"),
    Column("bits", _verdict), of=having("asked"),
)  # fmt: skip


def drawn(rows: Rows) -> str:
    return listed(
        f"{row['steps']} steps drawn at random: {row['plans']} plans, {row['with_kernels_again']} "
        "of them with kernels "
        f"that run again, {row['kernels_again']} in all; of {row['arrays']} arrays "
        f"{sum(map(len, row['unequal'].values()))} differ.{_nested(row)}"
        for row in having("plans")(rows)
    )


def _nested(row: Row) -> str:
    """More sums for programs with loops, branches and effects."""
    if not row.get("nested"):
        return ""
    return (
        f" Nested in loops and branches: {row['infeasible']} budgets were too small and gave way "
        "to the smallest plan; "
        f"{row['gated']} plans have other kernels and pass the numbers gate, "
        f"{row['bits_of_gated']} of them with equal "
        f"bits; of {row['effects']} effects, others than plain in {len(row['other_effects'])} "
        "plans; wrong: "
        f"{row['wrong'] or 'none'}."
    )


# memplan against what JAX users have today.

_RIVALS = (
    _STEP, Column("share", "share", "{:.0%}"), ms("plain ms", "plain_s"),
    Column("memplan ms", lambda row: _ms_or_none(row["own_s"])),
    Column("over plain", more("own_s", "plain_s"), "{:+.1%}"),
    Column("XLA ms", lambda row: _ms_or_none(row["xla_s"])),
    Column("best policy that fits, ms", lambda row: _ms_or_none(row["policy_s"]) + row["policy"]),
    ms("bound ms", "bound_s"),
)  # fmt: skip


def rivals(rows: Rows) -> str:
    compared = [
        comparison
        for case, points in groupby(rows, lambda row: row["case"])
        for comparison in comparisons(case, list(points))
    ]
    return "\n\n".join((table(_RIVALS, compared), listed(rival_sums(compared))))


def comparisons(case: str, points: Rows) -> Iterator[Row]:
    """A row for each budget, largest first: seconds by each method, None if nothing fits."""
    plain = points[0]
    for share in SHARES:
        budget = int(share * plain["device_bytes"])
        at = {point["way"]: point["step_s"] for point in points if point["budget_bytes"] == budget}
        unplanned = (point for point in points if point["budget_bytes"] is None and point["step_s"])
        policy = _fastest(point for point in unplanned if (point["device_bytes"] or 0) <= budget)
        policy_name = f" ({policy['way'].partition(', ')[2]})" if policy else ""
        yield {
            "case": case, "share": share, "plain_s": plain["step_s"], "own_s": at[MEMPLAN],
            "xla_s": at[XLA],
            "policy_s": policy.get("step_s"), "policy": policy_name, "bound_s": at[BOUND] or 0.0,
        }  # fmt: skip


def _ms_or_none(seconds: float | None) -> str:
    return "none fits" if seconds is None else f"{1e3 * seconds:.1f}"


def rival_sums(rows: Sequence[Row]) -> Iterator[str]:
    solved = [row for row in rows if row["own_s"] is not None]
    against = [row for row in rows if row["xla_s"] is not None]
    rivalled = [row for row in rows if _rival(row) < math.inf]
    policies = sum(row["policy_s"] is not None for row in rows)
    yield (
        f"{len(solved)} of {len(rows)} cases have a plan of memplan's own that fits; XLA's own "
        f"fits in {len(against)}, "
        f"a policy in {policies}."
    )
    best = sum(_own(row) <= _rival(row) for row in rivalled)
    yield (
        f"In {best} of the {len(rivalled)} cases where any rival fits, "
        "memplan's own plan is at least as fast."
    )
    ahead = sum(_own(row) < row["xla_s"] for row in against)
    alone = sum(row["xla_s"] is None for row in solved)
    yield (
        f"In {ahead} of the {len(against)} cases where XLA's own fits, memplan's own plan is "
        f"faster; in {alone} more, "
        "XLA's own does not fit."
    )
    halves = [_own(row) / row["plain_s"] - 1 for row in solved if row["share"] == 0.5]
    if halves:
        yield f"Median overhead at 50 %: {median(halves):.1%} over {len(halves)} steps."
    if solved:
        gap = median(_own(row) / row["bound_s"] - 1 for row in solved)
        fastest = ((row["bound_s"], min(_own(row), _rival(row))) for row in rows)
        below = sum(
            fastest_s < bound and not math.isclose(fastest_s, bound) for bound, fastest_s in fastest
        )
        yield f"Median distance to the bound: {gap:.1%}; programs that are below it: {below}."


def _own(row: Row) -> float:
    return math.inf if row["own_s"] is None else row["own_s"]


def _rival(row: Row) -> float:
    return min(
        (seconds for seconds in (row["xla_s"], row["policy_s"]) if seconds is not None),
        default=math.inf,
    )


# Sizes.


_SIZES = (
    Column("largest", "of"), _DEVICE, *(Column(method, method) for method in METHODS),
    Column("pixels, plain's", _ratio("own", "plains"), "{:.1f}x"),
    Column("jax.checkpoint's", _ratio("own", "checkpoints"), "{:.1f}x"),
    Column("what refuses the next", "limit"),
)  # fmt: skip
_AT_ITS_LARGEST = (
    Column("largest", "of"), _DEVICE, Column("way", "way"), Column("size", "size"), _DEVICE_MIB,
    _HOST_MIB,
    ms("step ms", "step_s", "{:.0f}"),
    Column("Mpixel/s", lambda row: row["growth"].pixels(row["size"]) / row["step_s"] / 1e6,
        "{:.1f}"),
)  # fmt: skip


def large_images(rows: Rows) -> str:
    def compared(cells: dict[str, Row]) -> Row:
        sizes = {method: row.get("size") for method, row in cells.items()}
        pixels = {
            method: row["growth"].pixels(row["size"])
            for method, row in cells.items()
            if row.get("size")
        }
        plain, checkpoint, _, own = METHODS
        return {
            **next(iter(cells.values())), **sizes, "own": pixels.get(own),
            "plains": pixels.get(plain),
            "checkpoints": pixels.get(checkpoint),
            "limit": cells[own].get("limit") if own in cells else None,
        }  # fmt: skip

    same = groupby(rows, lambda row: (row["of"], row["device"]))
    by_method = [{row["way"]: row for row in group} for _, group in same]
    at_its_largest = (row for row in rows if row.get("size"))
    return "\n\n".join(
        (table(_SIZES, map(compared, by_method)), table(_AT_ITS_LARGEST, at_its_largest))
    )


def _mpixels(seconds: str, nbytes: str) -> Callable[[Row], float | None]:
    return lambda row: (
        row["pixels"] / row[seconds] / 1e6 if row[nbytes] <= row["budget_bytes"] else None
    )


speed = shown(
    Column("speed", "of"), _DEVICE, Column("size", "size"),
    Column("jax.jit Mpixel/s", _mpixels("jit_step_s", "plain_bytes"), "{:.1f}"),
    Column("jax.checkpoint", _mpixels("checkpoint_step_s", "checkpoint_bytes"), "{:.1f}"),
    Column("memplan", _mpixels("step_s", "compiled_bytes"), "{:.1f}"),
    mib("its device MiB", "compiled_bytes"), mib("its host MiB", "host_bytes"),
    of=lambda rows: filter(fits, rows),
)  # fmt: skip
largest = shown(
    Column("sizes", lambda row: f"{row['case']} {row['low']} to {row['high']}"), _BUDGET,
    Column("largest", "largest"),
    Column("of every size", "of_every_size"), Column("traced", "traced"),
    Column("compiled programs", "compilations"),
    Column("s", "seconds", "{:.0f}"), Column("s for every size", "every_size_s", "{:.0f}"),
)  # fmt: skip

# Many devices, simulated.


_PUBLISHED = (
    Column("at 64 x 4 P100", lambda row: row["published"][0]),
    Column("published by DDL", lambda row: row["published"][1], "{:.0%}"),
    Column("replayed", "efficiency", "{:.1%}"),
)  # fmt: skip
_MESHES = (
    _CASE, Column("way", "way"),
    Column("bound MiB", lambda row: row["bound_bytes"] / MIB, "{:.1f}"),
    Column("sent by a host MiB", lambda row: row["sent_bytes"] / MIB, "{:.1f}"), _STEP_MS,
    ms("collectives ms", "collective_s"),
    Column("hidden", lambda row: _ratio("hidden_collective_s",
        "collective_s")(row) or float(not row["collective_s"]),
           "{:.0%}"),
    Column("over jax.jit", _ratio("step_s", "jit_step_s"), "{:.2f}"),
    Column("efficiency", "efficiency", "{:.1%}"),
)  # fmt: skip


def meshes(rows: Rows) -> str:
    published = [row for row in rows if "published" in row and row["way"] == "memplan.jit"]
    return "\n\n".join((table(_PUBLISHED, published), table(_MESHES, rows)))


_DIVIDED = (
    _CASE, mib("plain MiB", "plain_bytes"), ms("plain ms", "plain_step_s"),
    mib("budget MiB", "budget_bytes"),
    mib("memplan MiB", "compiled_bytes"),
    Column("predicted", _ratio("predicted_bytes", "compiled_bytes"), "{:.4f}"),
    mib("on the host MiB", "host_bytes"), ms("memplan ms", "step_s"),
    Column("over plain", _ratio("step_s", "plain_step_s"), "{:.3f}"),
)  # fmt: skip
sharded = shown(
    *_DIVIDED,
    ms("jax.checkpoint ms", "checkpoint_step_s"),
    Column("its time over memplan's", _ratio("checkpoint_step_s", "step_s"), "{:.2f}"),
)
public_meshes = shown(*_DIVIDED, Column("status", "status"))


def _beside_one_device(rows: Rows) -> Iterator[Row]:
    """Add the seconds of one device for the same volume, if known."""
    for row in rows:
        single = stored_result("slabs", row["single"])
        yield {**row, "single_s": single.rows[0]["step_s"] if single and single.rows else None}


space = shown(
    _CASE, mib("plain MiB", "plain_bytes"), ms("plain ms", "plain_step_s", "{:.0f}"),
    mib("budget MiB", "budget_bytes"), mib("memplan MiB", "compiled_bytes"),
    Column("predicted", _ratio("predicted_bytes", "compiled_bytes"), "{:.4f}"),
    mib("on the host MiB", "host_bytes"),
    Column("loops in slabs", "slab_loops"), ms("memplan ms", "step_s", "{:.0f}"),
    ms("one device ms", "single_s", "{:.0f}"),
    Column("times as fast", _ratio("single_s", "step_s"), "{:.1f}"),
    ms("collectives ms", "collective_s"),
    Column("hidden", _ratio("hidden_collective_s", "collective_s"), "{:.0%}"),
    mib("least halos MiB", "least_bytes"),
    Column("plain's", _ratio("plain_halo_bytes", "least_bytes"), "{:.2f}x"),
    Column("memplan's", _ratio("halo_bytes", "least_bytes"), "{:.2f}x"), of=_beside_one_device,
)  # fmt: skip


# What a release of jax changes.


def _grown(row: Row) -> str:
    buffer = row["largest"]
    if buffer is None:
        return ""
    where = f"{buffer['new_shape']}, {buffer['source']}, {buffer['name']}"
    return f"{row['largest_bytes'] / 1024:.1f} KiB: {buffer['kind']} {where}"


releases = shown(
    _STEP, Column("jax", lambda row: f"{row['old_jax']} to {row['jax']}"),
    mib("MiB before", "old_bytes"),
    Column("KiB more", lambda row: (row["compiled_bytes"] - row["old_bytes"]) / 1024, "{:+.1f}"),
    Column("", more("compiled_bytes", "old_bytes"), "{:+.3%}"),
    ms("ms before", "old_step_s", "{:.2f}"),
    Column("more", more("step_s", "old_step_s"), "{:+.2%}"), Column("exit code", "exit_code"),
    Column("grew", "grown"), Column("KiB", "grown_bytes", "{:.1f}", 1024),
    Column("shrank", "shrunk"), Column("KiB", "shrunk_bytes", "{:.1f}", 1024),
    Column("grew most", _grown),
)  # fmt: skip


# On the local device.


def _timed(name: str) -> Callable[[Row], str]:
    return lambda row: f"{row[name] / row['unit_s']:.4g} {'s' if row['unit_s'] == 1 else 'us'}"


_DEPTH = (
    Column("layers", "layers"), Column("kernels", "kernels"), _JIT,
    mib("smallest plan MiB", "smallest_bytes"),
    Column("explored, no limit", "unlimited_cpu_s", "{:.1f}"),
    Column("+ at half", "half_cpu_s", "{:.1f}"), Column("+ near the smallest", "tight_cpu_s", "{:.1f}"),
    Column("near over half", _ratio("tight_cpu_s", "half_cpu_s"), "{:.1f}"),
)  # fmt: skip


def depth(rows: Rows) -> str:
    """CPU seconds by depth, and the exponents of kernels with which they grow."""
    measured = having("kernels")(rows)
    lines = list[str]()
    for what, seconds in (("At half", "half_cpu_s"), ("Near the smallest plan", "tight_cpu_s")):
        points = [(math.log(row["kernels"]), math.log(row[seconds])) for row in measured]
        if len(points) > 1:
            slope = linear_regression(*zip(*points, strict=True)).slope
            lines.append(f"{what}, planning takes as many CPU seconds as kernels^{slope:.2f}.")
    return "\n\n".join((table(_DEPTH, rows), listed(lines)))


overhead = shown(
    Column("", "what"), Column("jax.jit", _timed("jax_s")),
    Column("memplan.jit", _timed("memplan_s")),
    Column("ratio", _ratio("memplan_s", "jax_s"), "{:.3f}"),
)  # fmt: skip
