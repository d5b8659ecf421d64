"""The command: what it prints where, which exit code, and one clear message for everything that can go wrong."""

from __future__ import annotations

import importlib.metadata
import json
import random
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from memplan import api
from memplan.cli import app as cli
from memplan.cli import factory, output
from memplan.errors import BudgetError, InfeasibleBudgetError, MemplanError
from memplan.report.comparison import Comparison, Row
from memplan.report.curve import Curve, Point
from memplan.report.frontier import Frontier, Tried
from memplan.report.model import LiveValue, Report
from tests.report.timelines import random_timeline

REPORT = Report(
    device="v100",
    runs_on="cpu",
    status="fits",
    planner="greedy",
    budget_bytes=2**30,
    host_budget_bytes=2**31,
    baseline_peak_bytes=2**31,
    predicted_peak_bytes=2**29,
    compiled_peak_bytes=2**29,
    observed_peak_bytes=None,
    host_peak_bytes=2**28,
    offloaded_bytes=2**28,
    recomputed_flops=1e9,
    baseline_step_s=0.1,
    predicted_step_s=0.2,
    floor_bytes=2**27,
    lower_bound_s=0.1,
    live_at_peak=(LiveValue("<script>alert(1)</script>", 7, "f32[1]", "net.py:3", "keep"),),
)


@dataclass
class Planner:
    """Stands in for `memplan.jit`: remembers what it was asked for and answers with `report` or `error`."""

    report: Report = REPORT
    error: Exception | None = None
    asked: list[dict[str, Any]] = field(default_factory=list)
    args: tuple[Any, ...] = ()

    def jit(self, step: Callable[..., Any], **options: Any) -> Planner:
        self.asked.append(options)
        if self.error is not None:
            raise self.error
        return self

    def __call__(self, *args: Any) -> None:
        raise AssertionError("the command never runs the step")

    def plan(self, *args: Any) -> Planner:
        self.args = args
        return self


@pytest.fixture
def planner(monkeypatch: pytest.MonkeyPatch) -> Planner:
    stand_in = Planner()
    monkeypatch.setattr(api, "jit", stand_in.jit)
    return stand_in


@pytest.fixture(autouse=True)
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current directory with a module `workshop`; forgotten afterwards."""
    (tmp_path / "workshop.py").write_text(
        textwrap.dedent(
            """
            def step(state, batch):
                return state

            def make(size=1, **rest):
                print("hello from the factory")
                return step, ({"w": size, **rest}, 2)

            def alone(): return lambda x: x, (1,)
            def none(): return None
            def three(): return step, (1, 2), 3
            def no_step(): return 5, (1,)
            def no_args(): return step, {"state": 1}
            def angry(): raise RuntimeError("no data here")

            made = 5
            """
        )
    )
    (tmp_path / "broken.py").write_text("import no_such_thing_at_all")
    (tmp_path / "raising.py").write_text("raise ValueError('at import')")
    (tmp_path / "leaving.py").write_text("import sys; sys.exit(0)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name in ("workshop", "experiments") or name.startswith("experiments."):
            del sys.modules[name]


def run(*words: str) -> Result:
    return CliRunner().invoke(cli.app, list(words))


def told(result: Result, code: int) -> str:
    """The message of a run that failed with `code`, of which nothing reached standard output."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return " ".join(result.stderr.replace("│", " ").split())


def test_inspect_prints_the_report(planner: Planner) -> None:
    result = run("inspect", "workshop:make")
    assert result.exit_code == 0
    assert "512.0 MiB compiled" in result.stdout
    assert "hello from the factory" not in result.stdout
    assert planner.args == ({"w": 1}, 2)


def test_inspect_passes_its_options_on(planner: Planner) -> None:
    options = {"budget": "1GiB", "host_budget": "2GiB", "device": "v100", "planner": "greedy", "verify": "numbers"}
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
    assert run("inspect", "workshop:make", *words).exit_code == 0
    assert planner.asked == [{**options, "donate_argnums": (0,)}]


@pytest.mark.parametrize(
    ("words", "donated"),
    [
        (["workshop:make"], (0,)),
        (["workshop:alone"], ()),
        (["workshop:make", "--donate", "none"], ()),
        (["workshop:make", "--donate", "1"], (1,)),
        (["workshop:make", "--donate", "0,1"], (0, 1)),
    ],
)
def test_donation(planner: Planner, words: list[str], donated: tuple[int, ...]) -> None:
    assert run("inspect", *words).exit_code == 0
    assert planner.asked[0]["donate_argnums"] == donated


def test_verify_none_is_none(planner: Planner) -> None:
    assert run("inspect", "workshop:make", "--verify", "none").exit_code == 0
    assert planner.asked[0]["verify"] is None


def test_factory_arguments_are_literals(planner: Planner) -> None:
    call = "workshop:make(size=(2, 3), name='a:b(c)', deep={'x': [1, -2.5, None, True]})"
    assert run("inspect", call).exit_code == 0
    assert planner.args[0] == {"w": (2, 3), "name": "a:b(c)", "deep": {"x": [1, -2.5, None, True]}}


def test_json_alone_on_standard_output(planner: Planner) -> None:
    result = run("inspect", "workshop:make", "--json", "-")
    assert result.exit_code == 0
    assert Report.from_json(result.stdout) == REPORT
    assert json.loads(result.stdout)["schema"] == "memplan.report/1"


def test_files_are_written_beside_the_table(planner: Planner, workshop: Path) -> None:
    result = run("inspect", "workshop:make", "--json", "r.json", "--html", "r.html")
    assert result.exit_code == 0
    assert "device budget" in result.stdout
    assert Report.from_json((workshop / "r.json").read_text()) == REPORT
    page = (workshop / "r.html").read_text()
    assert "default-src 'none'" in page and "<script>alert" not in page
    assert "&lt;script&gt;" in page


@pytest.mark.parametrize(
    ("reference", "hint"),
    [
        ("workshop", "names no factory"),
        ("work shop:make", "names no factory"),
        ("workshop:make(", "is not a call"),
        ("workshop:make(1)", "without its name"),
        ("workshop:make(**{'a': 1})", "unpacks a mapping"),
        ("workshop:make(size=open('x'))", "is not a literal"),
        ("workshop:make(size=__import__('os').getcwd())", "is not a literal"),
        ("workshop:make + 1", "is not the name of a factory"),
        ("nowhere_at_all:make", "There is no module 'nowhere_at_all'"),
        ("workshop.inner:make", "There is no module 'workshop.inner'"),
        ("broken:make", "imports 'no_such_thing_at_all', which is missing"),
        ("raising:make", "failed with ValueError: at import"),
        ("leaving:make", "failed with SystemExit"),
        ("workshop:mak", "Did you mean make?"),
        ("workshop:made", "is a int, not a function"),
        ("workshop:alone(size=2)", "unexpected keyword argument"),
        ("workshop:angry", "failed with RuntimeError: no data here"),
        ("workshop:none", "returned a NoneType"),
        ("workshop:three", "returned a tuple of 3"),
        ("workshop:no_step", "returned a int as its step"),
        ("workshop:no_args", "returned a dict as its args"),
    ],
)
def test_a_bad_factory_is_a_usage_error(planner: Planner, reference: str, hint: str) -> None:
    assert hint in told(run("inspect", reference), 2)
    assert not planner.asked


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--donate", "2"], "among 2 arguments"),
        (["--donate", "state"], "are not positions"),
        (["--verify", "twice"], "none of compile, numbers, none"),
        (["--json", "no/such/folder/r.json"], "is not a folder"),
        (["--html", "."], "it is a folder"),
        (["--json", "same", "--html", "same"], "cannot hold both"),
        (["--html", "-"], "only JSON"),
    ],
)
def test_a_bad_option_is_a_usage_error(planner: Planner, workshop: Path, words: list[str], hint: str) -> None:
    before = sorted(workshop.iterdir())
    assert hint in told(run("inspect", "workshop:make", *words), 2)
    assert [path for path in sorted(workshop.iterdir()) if path.name != "__pycache__"] == before
    assert not planner.asked


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InfeasibleBudgetError("the floor is [9 GiB]", floor_bytes=9, smallest_bytes=10, operation="conv"), 3),
        (BudgetError("'5 apples' is not a budget"), 2),
        (MemplanError("there is no planner 'x'"), 2),
        (ZeroDivisionError("inside the step"), 1),
        (OSError("inside the step"), 1),
    ],
)
def test_errors_are_one_message_and_a_code(planner: Planner, workshop: Path, error: Exception, code: int) -> None:
    planner.error = error
    message = told(run("inspect", "workshop:make", "--json", "r.json"), code)
    assert str(error) in message
    assert ("--debug" in message) == (code == 1)
    assert not (workshop / "r.json").exists()


def test_debug_shows_the_traceback(planner: Planner) -> None:
    planner.error = ZeroDivisionError("inside the step")
    result = run("inspect", "workshop:make", "--debug")
    assert result.exit_code == 1
    assert "Traceback" in result.stderr
    assert "ZeroDivisionError: inside the step" in result.stderr


def test_a_disk_that_fills_up_is_told(planner: Planner, workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert "No space left on device" in told(run("inspect", "workshop:make", "--json", "r.json"), 2)
    assert not list(workshop.glob("*r.json*"))


def test_a_step_with_its_own_plan_keeps_its_options(planner: Planner, workshop: Path) -> None:
    (workshop / "ready.py").write_text("from memplan import api\ndef make(): return api.jit(len, budget=3), ([1],)\n")
    assert run("inspect", "ready:make").exit_code == 0
    assert planner.asked == [{"budget": 3}]
    assert "return the plain step" in told(run("inspect", "ready:make", "--budget", "1GiB"), 2)
    assert "plain step" in told(run("compare", "ready:make"), 2)


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    asked: list[dict[str, Any]] = []

    def compare(step: Callable[..., Any], args: tuple[Any, ...], **options: Any) -> Comparison:
        asked.append({"args": args, **options})
        fits = options["budget"] != "1KiB"
        return Comparison((Row("plain", 2**31, 0, 0.1, False), Row("memplan", 2**29, 2**28, 0.2, fits)), "v100", 2**30)

    monkeypatch.setattr(api, "compare", compare, raising=False)
    return asked


def test_compare_prints_a_row_for_each_way(compared: list[dict[str, Any]]) -> None:
    result = run("compare", "workshop:make(size=4)", "--budget", "1GiB", "--device", "v100")
    assert result.exit_code == 0
    assert "memplan" in result.stdout
    assert compared == [
        {"args": ({"w": 4}, 2), "budget": "1GiB", "host_budget": None, "device": "v100", "donate_argnums": (0,)}
    ]


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
    asked: list[dict[str, Any]] = []

    def curve(step: Callable[..., Any], args: tuple[Any, ...], **options: Any) -> Curve:
        asked.append({"args": args, **options})
        return Curve(
            (Point("plain jax", None, 2**31, 0, 0.1), Point("memplan", 2**30, 2**29, 0, 0.2)), "v100", 2**31, 0.1, 9
        )

    monkeypatch.setattr(api, "curve", curve)
    return asked


def test_curve_prints_writes_and_draws(curved: list[dict[str, Any]], workshop: Path) -> None:
    result = run("curve", "workshop:make", "--points", "3", "--device", "v100", "--json", "c.json", "--png", "c.png")
    assert result.exit_code == 0
    assert "+100.0%" in result.stdout
    assert curved[0]["points"] == 3 and curved[0]["device"] == "v100" and curved[0]["donate_argnums"] == (0,)
    assert Curve.from_json((workshop / "c.json").read_text()).points[1].way == "memplan"
    assert (workshop / "c.png").read_bytes().startswith(b"\x89PNG")


def test_curve_needs_the_plain_step_and_a_place_to_write(curved: list[dict[str, Any]], workshop: Path) -> None:
    (workshop / "ready.py").write_text("from memplan import api\ndef make(): return api.jit(len, budget=3), ([1],)\n")
    assert "plain step" in told(run("curve", "ready:make"), 2)
    assert "nowhere" in told(run("curve", "workshop:make", "--png", "nowhere/c.png"), 2)
    assert "of its own" in told(run("curve", "workshop:make", "--png", "c", "--json", "c"), 2)
    assert not curved


def test_inspect_writes_traces_and_pictures(planner: Planner, workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "report", replace(REPORT, timeline=random_timeline(random.Random(0))), raising=False)
    result = run("inspect", "workshop:make", "--trace", "t.pftrace", "--png", "t.png")
    assert result.exit_code == 0, result.output
    assert (workshop / "t.pftrace").stat().st_size and (workshop / "t.png").read_bytes().startswith(b"\x89PNG")


def test_inspect_says_why_there_is_no_trace(planner: Planner, workshop: Path) -> None:
    result = run("inspect", "workshop:make", "--trace", "t.pftrace")
    assert result.exit_code == 2 and "no memory over time" in " ".join(result.stderr.replace("│", " ").split())
    assert "greedy" in result.stdout and not (workshop / "t.pftrace").exists()
    assert "of its own" in told(run("inspect", "workshop:make", "--trace", "a", "--json", "a"), 2)


@pytest.fixture
def sized(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    asked: list[dict[str, Any]] = []

    def frontier(make: Callable[..., Any], **options: Any) -> Frontier:
        low, high = options["low"], options["high"]
        asked.append({"made": make(*high)[1], **options})
        tried = (
            Tried(low, True, 2**29, 0, "milp", 2**28, "conv", 2),
            Tried(high, False, 2**31, 0, "xla", 2**28, "", 3),
        )
        return Frontier(tuple(options["names"]), (low,), (high,), tried, 4, "v100", 2**30, 0)

    monkeypatch.setattr(api, "frontier", frontier)
    return asked


def test_largest_varies_arguments_of_the_factory(sized: list[dict[str, Any]], workshop: Path) -> None:
    words = ["--vary", "size=8:64:8", "--vary", "batch=1:4", "--budget", "1GiB", "--json", "l.json"]
    result = run("largest", "workshop:make(dtype='float32')", *words)
    assert result.exit_code == 0, result.output
    assert "2.00 GiB" in result.stdout and "in 5 programs" in result.stdout
    [asked] = sized
    assert asked["names"] == ("size", "batch") and asked["step"] == (8, 1) and asked["budget"] == "1GiB"
    assert asked["made"] == ({"w": 64, "batch": 4, "dtype": "float32"}, 2) and asked["donate_argnums"] == (0,)
    assert Frontier.from_json((workshop / "l.json").read_text()).largest == ((8, 1),)


@pytest.mark.parametrize("words", ["size", "size=1", "size=a:b", "size=1:2:3:4", "=1:2"])
def test_largest_says_how_ranges_are_written(sized: list[dict[str, Any]], words: str) -> None:
    assert "batch=1:64" in told(run("largest", "workshop:make", "--vary", words), 2)
    assert not sized


def test_devices_are_listed_with_their_links() -> None:
    result = run("devices")
    assert result.exit_code == 0
    assert "v100" in result.stdout
    assert "nvlink-c2c" in result.stdout


def test_devices_as_json() -> None:
    listed = json.loads(run("devices", "--json", "-").stdout)["devices"]
    by_name = {device["name"]: device for device in listed}
    assert by_name["v100"]["memory_bytes"] > 15 * 2**30
    assert by_name["v100"]["float32_flops"] > 1e12


def demo_in(folder: Path, source: str) -> None:
    room = folder / "experiments" / "applications" / "segmentation"
    room.mkdir(parents=True)
    for package in (room, room.parent, room.parent.parent):
        (package / "__init__.py").touch()
    (room / "demo.py").write_text(textwrap.dedent(source))


def forget_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name == "experiments" or name.startswith("experiments.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if not (Path(path) / "experiments").is_dir()])


def test_demo_passes_on_what_was_given(workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_the_demo(monkeypatch)
    demo_in(workshop, "def main(**options): print(sorted(options.items())); return 3")
    result = run("demo", "--size", "16", "--steps", "2", "--budget", "80%")
    assert result.exit_code == 3
    assert result.stdout.strip() == "[('budget', '80%'), ('size', 16), ('steps', 2)]"


def test_demo_without_result_is_fine(workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_the_demo(monkeypatch)
    demo_in(workshop, "def main(**options): pass")
    assert run("demo").exit_code == 0


def test_demo_outside_a_checkout_says_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_the_demo(monkeypatch)
    assert "in the top folder of a checkout" in told(run("demo"), 2)


def test_demo_names_the_package_it_lacks(workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_the_demo(monkeypatch)
    demo_in(workshop, "import a_reader_of_scans")
    message = told(run("demo"), 2)
    assert "a_reader_of_scans" in message
    assert "pip install '.[demo]'" in message


def test_progress_reaches_the_stage_line(planner: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(output.Stages, "__call__", lambda self, stage, fraction=None: seen.append(stage))
    assert run("inspect", "workshop:make").exit_code == 0
    assert seen == ["loading workshop:make"]


def test_version_and_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", {"memplan": "1.2.3"}.get)
    assert run("--version").stdout == "1.2.3\n"
    assert "inspect" in run("--help").stdout
    assert run("unheard-of").exit_code == 2


def test_the_current_directory_is_importable_once(workshop: Path) -> None:
    reference = factory.parse("workshop:make")
    factory.load(reference)
    factory.load(replace(reference, name="alone"))
    assert sys.path.count(str(workshop)) == 1
