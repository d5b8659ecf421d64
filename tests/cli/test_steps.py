"""Commands that plan a step: the options that they pass on, and their output."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memplan import api
from memplan.errors import TimeLimitError
from memplan.report.comparison import Comparison, Row
from memplan.report.curve import Curve, Point
from memplan.report.diagnosis import Diagnosis, Finding
from memplan.report.frontier import Frontier, Trial
from memplan.report.result import Interrupted
from tests.cli.command import REPORT, Planner, message, run
from tests.report.timelines import random_timeline

# Options of `memplan.jit` that commands do not have.
UNSAID = dict.fromkeys(("planner", "topology", "between_hosts", "time_limit"))


def test_inspect_prints_the_report(planner: Planner) -> None:
    result = run("inspect", "workshop:make")
    assert result.exit_code == 0
    assert "512.0 MiB compiled" in result.stdout
    assert "hello from the factory" not in result.stdout
    assert planner.args == ({"w": 1}, 2)


def test_inspect_passes_its_options_on(planner: Planner) -> None:
    options = {"budget": "1GiB", "host_budget": "2GiB", "device": "v100", "verify": "numbers"}
    words = [
        word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)
    ]
    assert run("inspect", "workshop:make", *words).exit_code == 0
    assert (
        run(
            "inspect", "workshop:make", "--no-split", "--pin", "a.b=host", "--pin", "c=recompute"
        ).exit_code
        == 0
    )
    state = {"donate_argnums": (0,), "host_state": ()}
    whole = {"split": False, **state, "pin": {"a.b": "host", "c": "recompute"}, "time_limit": None}
    split = {"split": "auto", **state, "pin": None, "time_limit": None}
    none = {**dict.fromkeys(options), "verify": "compile"}
    unsaid = {"plan": None, **UNSAID}
    assert planner.requests == [{**options, **split, **unsaid}, {**none, **whole, **unsaid}]


def test_a_pin_needs_a_place(planner: Planner) -> None:
    assert "Write NAME=host" in message(run("inspect", "workshop:make", "--pin", "a"), 2)


def test_inspect_writes_traces_and_pictures(planner: Planner, workshop: Path) -> None:
    planner.report = replace(REPORT, timeline=random_timeline(random.Random(0)))
    result = run("inspect", "workshop:make", "--trace", "t.pftrace", "--png", "t.png")
    assert result.exit_code == 0, result.output
    assert (workshop / "t.pftrace").stat().st_size and (workshop / "t.png").read_bytes().startswith(
        b"\x89PNG"
    )


def test_inspect_says_why_there_is_no_trace(planner: Planner, workshop: Path) -> None:
    result = run("inspect", "workshop:make", "--trace", "t.pftrace")
    assert result.exit_code == 2 and "no timeline" in " ".join(
        result.stderr.replace("│", " ").split()
    )
    assert "greedy" in result.stdout and not (workshop / "t.pftrace").exists()
    assert "of its own" in message(
        run("inspect", "workshop:make", "--trace", "a", "--json", "a"), 2
    )


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    requests: list[dict[str, Any]] = []

    def doctor(step: Callable[..., Any], args: tuple[Any, ...], **options: Any) -> Diagnosis:
        requests.append({"args": args, **options})
        donate = Finding("donate", "donate argument 0", 2**20, 0.0, 2**29, "compiled", position=0)
        budget = 2**28 if options["budget"] == "256MiB" else 2**30
        return Diagnosis(
            "v100", budget, 2**29, 0.1, (donate,) if options["budget"] == "1GiB" else (), 2
        )

    monkeypatch.setattr(api, "doctor", doctor)
    return requests


@pytest.mark.parametrize(("budget", "code"), [("1GiB", 1), ("256MiB", 1), ("2GiB", 0)])
def test_doctor_exits_with_1_unless_the_step_fits_without_findings(
    examined: list[dict[str, Any]], budget: str, code: int
) -> None:
    words = f"doctor workshop:make(size=4) --budget {budget} --device v100 --json d.json"
    result = run(*words.split())
    assert result.exit_code == code, result.output
    assert "memplan doctor" in result.stdout and ("donate argument 0" in result.stdout) == (
        budget == "1GiB"
    )
    assert Diagnosis.from_json(Path("d.json").read_text()).device == "v100"
    assert examined == [{**options_of(budget), "args": ({"w": 4}, 2), "donate_argnums": None}]


def options_of(budget: str) -> dict[str, Any]:
    """Those of a command that asks for a budget and a device."""
    common = {"host_budget": None, "device": "v100", "split": "auto", "donate_argnums": (0,)}
    return {"budget": budget, **common, "host_state": (), "pin": None, **UNSAID}


def test_doctor_passes_donated_arguments_on(examined: list[dict[str, Any]]) -> None:
    run("doctor", "workshop:make", "--donate", "0,1")
    run("doctor", "workshop:make", "--donate", "none")
    assert [request["donate_argnums"] for request in examined] == [(0, 1), ()]


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    requests: list[dict[str, Any]] = []

    def compare(step: Callable[..., Any], args: tuple[Any, ...], **options: Any) -> Comparison:
        requests.append({"args": args, **options})
        fits = options["budget"] != "1KiB"
        rows = Row("plain", 2**31, 0, 0.1, False), Row("memplan", 2**29, 2**28, 0.2, fits)
        return Comparison(rows, "v100", 2**30)

    monkeypatch.setattr(api, "compare", compare, raising=False)
    return requests


def test_compare_prints_a_row_for_each_method(compared: list[dict[str, Any]]) -> None:
    result = run("compare", "workshop:make(size=4)", "--budget", "1GiB", "--device", "v100")
    assert result.exit_code == 0
    assert "memplan" in result.stdout
    assert compared == [{"args": ({"w": 4}, 2), **options_of("1GiB")}]
    run("compare", "workshop:make", "--no-split")
    assert compared[1]["split"] is False


def test_compare_writes_json_and_pages(compared: list[dict[str, Any]], workshop: Path) -> None:
    result = run("compare", "workshop:make", "--json", "-", "--html", "c.html")
    assert result.exit_code == 0
    assert [row.name for row in Comparison.from_json(result.stdout).rows] == ["plain", "memplan"]
    assert "memplan" in (workshop / "c.html").read_text()


def test_compare_where_nothing_fits(compared: list[dict[str, Any]]) -> None:
    result = run("compare", "workshop:make", "--budget", "1KiB")
    assert result.exit_code == 3
    assert "memplan" in result.stdout


@pytest.fixture
def curved(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    requests: list[dict[str, Any]] = []

    def curve(step: Callable[..., Any], args: tuple[Any, ...], **options: Any) -> Curve:
        requests.append({"args": args, **options})
        points = Point("plain jax", None, 2**31, 0, 0.1), Point("memplan", 2**30, 2**29, 0, 0.2)
        result = Curve(points, "v100", 2**31, 0.1, 9)
        if options["points"] == 7:
            raise Interrupted(replace(result, ended_by="Ctrl-C"))
        return result

    monkeypatch.setattr(api, "curve", curve)
    return requests


def test_curve_prints_writes_and_draws(curved: list[dict[str, Any]], workshop: Path) -> None:
    words = "curve workshop:make --points 3 --device v100 --json c.json --png c.png"
    result = run(*words.split())
    assert result.exit_code == 0
    assert "+100.0%" in result.stdout
    assert (
        curved[0]["points"] == 3
        and curved[0]["device"] == "v100"
        and curved[0]["donate_argnums"] == (0,)
    )
    assert Curve.from_json((workshop / "c.json").read_text()).points[1].way == "memplan"
    assert (workshop / "c.png").read_bytes().startswith(b"\x89PNG")


def test_ctrl_c_in_a_curve_writes_what_is_done(
    curved: list[dict[str, Any]], workshop: Path
) -> None:
    words = "curve workshop:make --points 7 --time-limit 90 --json c.json --html c.html --png c.png"
    result = run(*words.split())
    assert result.exit_code == 130 and curved[0]["time_limit"] == 90.0
    assert "incomplete: Ctrl-C ended it" in " ".join(result.stdout.split())
    assert Curve.from_json((workshop / "c.json").read_text()).ended_by == "Ctrl-C"
    assert (workshop / "c.html").exists() and (workshop / "c.png").exists()


def test_a_time_limit_with_nothing_is_a_failure(planner: Planner) -> None:
    planner.error = TimeLimitError("the time limit ended it", smallest_bytes=3)
    assert "the time limit ended it" in message(run("inspect", "workshop:make"), 1)


def test_curve_needs_a_place_to_write(curved: list[dict[str, Any]], workshop: Path) -> None:
    assert "nowhere" in message(run("curve", "workshop:make", "--png", "nowhere/c.png"), 2)
    assert "of its own" in message(run("curve", "workshop:make", "--png", "c", "--json", "c"), 2)
    assert not curved


@pytest.fixture
def sized(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    requests: list[dict[str, Any]] = []

    def frontier(make: Callable[..., Any], **options: Any) -> Frontier:
        low, high = options["low"], options["high"]
        requests.append({"args": make(high)[1], **options})
        first = Trial(low, True, 2**29, 0, "milp", 2**28, "conv", 2)
        last = Trial(high, False, 2**31, 0, "xla", 2**28, "", 3)
        return Frontier(options["name"], low, high, (first, last), "v100", 2**30, 0)

    monkeypatch.setattr(api, "frontier", frontier)
    return requests


def test_largest_varies_an_argument_of_the_factory(
    sized: list[dict[str, Any]], workshop: Path
) -> None:
    words = "--vary size=8:64:8 --budget 1GiB --json l.json --no-split --host-state 0"
    result = run("largest", "workshop:make(batch=4, dtype='float32')", *words.split())
    assert result.exit_code == 0, result.output
    assert "2.00 GiB" in result.stdout and "in 5 programs" in result.stdout
    [request] = sized
    assert request["name"] == "size" and request["step"] == 8 and request["budget"] == "1GiB"
    assert request["args"] == ({"w": 64, "batch": 4, "dtype": "float32"}, 2) and request[
        "donate_argnums"
    ] == (0,)
    assert request["split"] is False and request["host_state"] == (0,)
    assert Frontier.from_json((workshop / "l.json").read_text()).largest == 8


@pytest.mark.parametrize("words", ["size", "size=1", "size=a:b", "size=1:2:3:4", "=1:2"])
def test_largest_says_how_ranges_are_written(sized: list[dict[str, Any]], words: str) -> None:
    assert "batch=1:64" in message(run("largest", "workshop:make", "--vary", words), 2)
    assert not sized


def test_largest_varies_one_size_at_a_time(sized: list[dict[str, Any]]) -> None:
    result = run("largest", "workshop:make", "--vary", "size=8:64", "--vary", "batch=1:4")
    assert "--vary takes one size" in message(result, 2)
    assert not sized
