"""`memplan check`: its comparison, its exit codes, and its errors about bad files."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memplan import api
from memplan.report.model import LiveValue, Report
from tests.cli.command import REPORT, message, run

MIB = 2**20
WEIGHTS = LiveValue("net/layer_0/attention", 400 * MIB, "float32[400,512,512]", "net.py:3", "")
PLAIN = replace(REPORT, budget_bytes=2**34, live_at_peak=(WEIGHTS,), versions=(("jax", "0.11.2"),))
CHECK = "check", "workshop:make", "--against", "saved.json"
GROWN = replace(
    PLAIN,
    compiled_peak_bytes=530 * MIB,
    live_at_peak=(
        replace(WEIGHTS, nbytes=418 * MIB, shape="float32[418,512,512]", source="net.py:9"),
    ),
)


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of each requested report; the report is that of `now.json`."""
    requests: list[dict[str, Any]] = []

    def report(step: Callable[..., Any], args: tuple[Any, ...], **options: Any) -> Report:
        requests.append(options)
        return Report.load_json("now.json")

    monkeypatch.setattr(api, "report", report)
    PLAIN.save_json("now.json")
    return requests


def test_a_first_report_is_saved_and_the_same_step_passes(
    requests: list[dict[str, Any]], workshop: Path
) -> None:
    first = run("check", "workshop:make(size=4, depth=2)", "--against", "saved.json", "--save")
    assert (
        first.exit_code == 0
        and "512.0 MiB compiled" in first.stdout
        and "wrote saved.json" in first.stderr
    )
    assert Report.load_json("saved.json") == replace(PLAIN, step="workshop:make(depth=2, size=4)")
    again = run(
        "check", "workshop:make(depth=2, size=4)", "--against", "saved.json", "--device", "v100"
    )
    assert again.exit_code == 0 and "device peak" in again.stdout and "Grew" not in again.stdout
    state = {
        "host_budget": None,
        "split": "auto",
        "donate_argnums": (0,),
        "host_state": (),
        "pin": None,
        **dict.fromkeys(("planner", "topology", "between_hosts", "time_limit")),
    }
    assert requests == [{"budget": None, "device": device, **state} for device in (None, "v100")]


def test_a_rise_fails_and_names_the_buffers(requests: list[dict[str, Any]], workshop: Path) -> None:
    PLAIN.save_json("saved.json")
    GROWN.save_json("now.json")
    result = run(*CHECK, "--html", "page.html", "--json", "d.json")
    assert result.exit_code == 1
    error = " ".join(result.stderr.split())
    assert (
        "workshop:make on v100: its compiled bytes rose by 3.516 %, from 512.0 MiB to 530.0 MiB (2 % are"
        in error
    )
    assert "predicted time" not in error and "--save" in error
    assert "larger float32[400 -> 418,512,512] net.py:9 net/layer_0/attention" in " ".join(
        result.stdout.split()
    )
    (change,) = json.loads((workshop / "d.json").read_text())["buffers"]
    sizes = change["old_bytes"], change["new_bytes"]
    assert change["kind"] == "larger" and sizes == (400 * MIB, 418 * MIB)
    assert "418,512,512" in (workshop / "page.html").read_text()


def test_a_fall_passes(requests: list[dict[str, Any]]) -> None:
    GROWN.save_json("saved.json")
    result = run(*CHECK, "--bytes", "0", "--ms", "0")
    assert result.exit_code == 0 and "Shrank at the peak: -18.0 MiB" in result.stdout


def test_the_tolerances_of_bytes_and_time(requests: list[dict[str, Any]]) -> None:
    PLAIN.save_json("saved.json")
    replace(GROWN, predicted_step_s=0.22).save_json("now.json")
    assert run(*CHECK, "--bytes", "4", "--ms", "10.1").exit_code == 0
    slower = run(*CHECK, "--bytes", "4")
    assert (
        slower.exit_code == 1
        and "predicted time rose by 10 %, from 200 ms to 220 ms" in slower.stderr
    )
    both = run(*CHECK)
    assert (
        both.exit_code == 1 and "compiled bytes" in both.stderr and "predicted time" in both.stderr
    )
    assert "bytes is -1.0" in message(run(*CHECK, "--bytes", "-1"), 2)
    assert "ms is nan" in message(run(*CHECK, "--ms", "nan"), 2)


def test_save_accepts_a_rise(requests: list[dict[str, Any]], workshop: Path) -> None:
    PLAIN.save_json("saved.json")
    GROWN.save_json("now.json")
    result = run(*CHECK, "--save")
    assert result.exit_code == 0 and "Grew at the peak" in result.stdout
    assert run(*CHECK).exit_code == 0
    assert sorted(path.name for path in workshop.glob("*.json*")) == ["now.json", "saved.json"]


def test_a_report_of_another_release_of_jax_is_compared(requests: list[dict[str, Any]]) -> None:
    replace(PLAIN, versions=(("jax", "0.12.0"),)).save_json("saved.json")
    result = run(*CHECK)
    assert result.exit_code == 0 and "jax 0.12.0 0.11.2" in " ".join(result.stdout.split())


def test_reports_of_other_steps_and_devices_are_refused(requests: list[dict[str, Any]]) -> None:
    replace(PLAIN, step="workshop:make(size=3)").save_json("saved.json")
    check = "check", "workshop:make(size=4)", "--against", "saved.json"
    assert "another step: workshop:make(size=3), not workshop:make(size=4)" in message(
        run(*check), 2
    )
    replace(PLAIN, device="a100").save_json("saved.json")
    assert "another device: a100, not v100" in message(run(*check), 2)
    assert run(*check, "--save").exit_code == 0
    assert Report.load_json("saved.json").device == "v100"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'{"schema": "memplan.report/1", "device": "v1', "not JSON"),
        (b"", "not JSON"),
        (b"\xff\xfe\x00", "utf-8"),
        (b"[" * 100_000, "not JSON"),
        (b'{"schema": "memplan.comparison/1"}', "memplan.comparison/1"),
        (b'{"name": "package", "version": "1"}', "schema None"),
        (b'{"schema": "memplan.report/1"}', "no entry 'device'"),
    ],
)
@pytest.mark.parametrize("save", [(), ("--save",)])
def test_a_file_that_is_no_report_is_left_alone(
    requests: Any, workshop: Path, content: bytes, expected: str, save: tuple[str, ...]
) -> None:
    (workshop / "saved.json").write_bytes(content)
    error = message(run(*CHECK, *save), 2)
    assert "saved.json holds no report" in error and expected in error
    assert (workshop / "saved.json").read_bytes() == content and not requests


def test_a_huge_file_is_not_read_whole(requests: list[dict[str, Any]], workshop: Path) -> None:
    with (workshop / "saved.json").open("wb") as file:
        file.truncate(2**40)
    error = message(run(*CHECK), 2)
    assert "saved.json holds no report" in error and "more than 256 MiB" in error and not requests


def test_the_error_about_a_missing_file_names_save(requests: list[dict[str, Any]]) -> None:
    error = message(run(*CHECK), 2)
    assert "saved.json cannot be read: No such file" in error and "--save writes" in error
    assert "--against" in message(run("check", "workshop:make"), 2)
    nowhere = run("check", "workshop:make", "--against", "nowhere/s.json", "--save")
    assert "nowhere is not a writable folder" in message(nowhere, 2)
    assert "of its own" in message(
        run("check", "workshop:make", "--against", "s", "--json", "s"), 2
    )
    assert not requests


def test_a_budget_is_passed_on(requests: list[dict[str, Any]]) -> None:
    assert run(*CHECK, "--save", "--budget", "1GiB").exit_code == 0
    assert requests[0]["budget"] == "1GiB"
