"""Reports as text, JSON and pages: complete, strict, and safe with any name."""

import dataclasses
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from memplan.report.diagnosis import Finding
from memplan.report.model import Report


class Tags(HTMLParser):
    """Every tag of a page, with its attributes, and whether all are closed."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_json_has_the_documented_form(report: Report) -> None:
    document = json.loads(report.to_json())
    assert '"observed_peak_bytes": null,\n' in report.to_json()
    assert next(iter(document)) == "schema"
    assert document["schema"] == Report.SCHEMA == "memplan.report/1"
    assert set(document) == {"schema", *(field.name for field in dataclasses.fields(Report))}
    assert document["versions"] == {"jax": "0.10.2", "python": "3.11.7"}
    choices = {"keep_bytes": 2**20, "recompute_s": 2e-3, "host_s": 1e-3, "host_wait_s": 0.0}
    assert document["decisions"][1] == {
        "name": "conv:1", "shape": [64, 112, 112, 1], "dtype": "float32", "nbytes": 2**20, "source": "/a/b/net.py:1",
        "decision": "offload", "seconds": 1e-3, "choices": {**choices, "no_recompute": "", "no_host": ""},
    }  # fmt: skip
    assert document["observed_peak_bytes"] is None


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_json_refuses_nan_and_infinity(report: Report, value: float) -> None:
    broken = replace(report, decisions=(replace(report.decisions[0], seconds=value),))
    with pytest.raises(ValueError, match=r"decisions\[0\]\.seconds"):
        broken.to_json()


def test_json_takes_numpy_numbers(report: Report) -> None:
    counted = replace(report, budget_bytes=np.int64(5), recomputed_flops=np.float64(2.5))
    read = Report.from_json(counted.to_json())
    assert (read.budget_bytes, read.recomputed_flops) == (5, 2.5)


def _edited(report: Report, **entries: Any) -> str:
    return json.dumps({**json.loads(report.to_json()), **entries})


def test_json_of_a_later_writer_is_read(report: Report) -> None:
    assert Report.from_json(_edited(report, invented_later=1)) == report


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ({"schema": "memplan.report/0"}, "memplan.report/0"),
        ({"budget_bytes": "much"}, "budget_bytes"),
        ({"budget_bytes": None}, "budget_bytes"),
        ({"attempts": True}, "attempts"),
        ({"decisions": [{}]}, r"decisions\[0\].name"),
        ({"live_at_peak": {}}, "live_at_peak"),
        ({"baseline_step_s": {}}, "baseline_step_s"),
        ({"recomputed_flops": 10**400}, "recomputed_flops"),
        ({"versions": 3}, "versions"),
        ({"planning_s": float("nan")}, "planning_s"),
    ],
)
def test_json_of_another_kind_is_refused(
    report: Report, entries: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        Report.from_json(_edited(report, **entries))


def test_json_of_another_decision_is_refused(report: Report) -> None:
    with pytest.raises(ValueError, match=r"decisions\[1\].decision"):
        Report.from_json(report.to_json().replace('"offload"', '"sell"'))


def test_text_has_the_figures_and_the_largest_rows(report: Report) -> None:
    text = str(report)
    assert "1.76 GiB compiled, 1.66 GiB predicted, not observed" in text
    assert "runs on cpu" in text
    assert "1.50 TFLOP" in text
    assert "(the largest 12 of 30)" in text
    assert re.search(r"29\.0 MiB +recompute +1\.0 MiB +1\.00 ms +- .* net\.py:29 +conv:29", text)
    assert re.search(r"28\.0 MiB +offload +1\.0 MiB +2\.00 ms +hidden ", text)
    assert re.search(r"27\.0 MiB +keep +0 B +- +500 us ", text)
    assert "conv:17" not in text
    empty = str(replace(report, decisions=(), live_at_peak=(), candidates=()))
    assert "Decisions" not in empty and "On the device" not in empty
    assert "constants" not in text
    assert re.search(r"constants +16\.0 MiB\n", str(replace(report, constant_bytes=1 << 24)))
    assert re.search(r"bound of its kernels +not known", text)
    bounded = str(replace(report, predicted_step_s=0.2, lower_bound_s=0.15))
    assert re.search(r"bound of its kernels +150 ms, 25\.0% below the plan", bounded)
    assert re.search(r"step, predicted .*, never compared with a run on this device\n", text)
    compared = str(replace(report, seconds_error=0.15))
    assert re.search(r"step, predicted .*, within 15% where it was compared with a run\n", compared)


def test_text_has_the_pools_and_exports(report: Report) -> None:
    assert "pool" not in str(report) and "runs only after" not in str(report)
    lines = ("export XLA_CLIENT_MEM_FRACTION=0.90", "export XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=70")
    pinned = {"pinned_bytes": 70 << 30, "pinned_regions_bytes": (64 << 30, 6 << 30)}
    text = str(replace(report, pool_peak_bytes=7 << 30, exports=lines, **pinned))
    assert re.search(r"in XLA's pool +7\.00 GiB", text)
    assert re.search(r"in XLA's pinned pool +70\.00 GiB, in 2 regions: 64\.00 GiB, 6\.00 GiB", text)
    assert all(re.search(f"runs only after +{line}", text) for line in lines)


def test_text_has_the_seconds_of_the_host(report: Report) -> None:
    assert "besides" not in str(report)
    text = str(replace(report, dispatch_s=0.0025))
    assert re.search(r"besides, on the host +2.50 ms to pass it its arrays", text)


def test_text_has_the_launches(report: Report) -> None:
    assert "CUDA graph" not in str(report)
    text = str(replace(report, cuda_graphs=2, single_launches=14))
    assert re.search(
        r"launched in a step +2 CUDA graphs, 14 kernels and copies outside of them", text
    )
    document = json.loads(report.to_json())
    del document["cuda_graphs"], document["single_launches"]
    assert Report.from_json(json.dumps(document)) == report


def test_findings_come_first_and_survive_json(report: Report) -> None:
    assert "What to do first" not in str(report)
    finding = Finding("closed over", "pass it", 1 << 24, 0.0, 1 << 30, "counted", source="net.py:3")
    with_finding = replace(report, findings=(finding,))
    assert str(with_finding).startswith("What to do first\n") and "pass it (net.py:3)" in str(
        with_finding
    )
    assert Report.from_json(with_finding.to_json()) == with_finding


def test_page_is_whole_escaped_and_alone(
    report: Report, drawn_report: Report, tmp_path: Path
) -> None:
    for original in (report, drawn_report):
        original.save_html(tmp_path / "report.html")
        page = (tmp_path / "report.html").read_text(encoding="utf-8")
        parsed = Tags(page)
        names = [tag for tag, _ in parsed.tags]
        assert not parsed.open
        assert "&lt;script&gt;" in page and "<script>alert" not in page and "\u2028" not in page
        assert names.count("script") == 2
        assert not set(names) & {"link", "img", "iframe"}
        assert not any(
            name in ("src", "href") or name.startswith("on")
            for _, attrs in parsed.tags
            for name in attrs
        )
        assert not re.search(r"https?://|@import|url\(", page)
        policy = next(
            attrs["content"]
            for tag, attrs in parsed.tags
            if tag == "meta" and "http-equiv" in attrs
        )
        assert policy.startswith("default-src 'none'; script-src 'sha256-")


def test_page_holds_the_whole_report(drawn_report: Report) -> None:
    """Numbers have nine digits; the timeline replaces `live_at_peak`."""
    script = r'<script type="application/json" id="report">(.*?)</script>'
    match = re.search(script, drawn_report.to_html(), re.DOTALL)
    shown = Report.from_json(
        json.dumps({**unpacked(json.loads(match[1])), "schema": Report.SCHEMA})
    )
    assert shown.decisions == drawn_report.decisions and shown.live_at_peak == ()
    assert (
        shown.timeline.values == drawn_report.timeline.values
        and shown.timeline.stays == drawn_report.timeline.stays
    )
    starts = [
        [instant.start_s for instant in timeline.instants]
        for timeline in (shown.timeline, drawn_report.timeline)
    ]
    assert starts[0] == pytest.approx(starts[1], rel=1e-8)


def unpacked(entry: Any) -> Any:
    """The inverse of `memplan.report.views.packed`, like the page's script."""
    if isinstance(entry, list):
        return [unpacked(value) for value in entry]
    if not isinstance(entry, dict):
        return entry
    if set(entry) == {"of", "at"}:
        of = unpacked(entry["of"])
        return [None if at < 0 else of[at] for at in entry["at"]]
    if set(entry) == {"rows", "columns"}:
        columns = {name: unpacked(column) for name, column in entry["columns"].items()}
        return [
            {name: column[row] for name, column in columns.items()} for row in range(entry["rows"])
        ]
    return {name: unpacked(value) for name, value in entry.items()}


def test_notebooks_get_the_page_in_a_frame_of_its_own(drawn_report: Report) -> None:
    body = drawn_report._repr_html_()
    parsed = Tags(body)
    assert [tag for tag, _ in parsed.tags] == ["iframe"]
    assert parsed.tags[0][1]["srcdoc"] == drawn_report.to_html()
    assert parsed.tags[0][1]["sandbox"] == "allow-scripts"


def test_without_html_there_are_tables(report: Report) -> None:
    written = list[str]()
    report._repr_pretty_(SimpleNamespace(text=written.append), False)
    assert "".join(written) == str(report)


def test_saved_json_replaces_an_older_file_in_place(report: Report, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("older")
    report.save_json(path)
    assert Report.from_json(path.read_text(encoding="utf-8")) == report
    assert [file.name for file in tmp_path.iterdir()] == ["report.json"]
