"""The page as a browser shows it: whole, alone, and usable by pointer and keys."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memplan.report.model import Report
from tests.report.timelines import HOSTILE, random_timeline


class Shown:
    """A page, with what it said on its console and asked of the network."""

    def __init__(self, context: Any, file: Path):
        self.page = context.new_page()
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.errors.append(message.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("dialog", lambda dialog: self.errors.append(f"dialog {dialog.message}") or dialog.dismiss())
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(file.as_uri())

    def texts(self, selector: str) -> list[str]:
        return self.page.locator(selector).all_inner_texts()

    def over_chart(self, right: float, down: float) -> None:
        """Point at a place of the chart, in shares of its sides."""
        box = self.page.locator("canvas.over").bounding_box()
        self.page.mouse.move(box["x"] + right * box["width"], box["y"] + down * box["height"])


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[Any]:
    contexts = []

    def show(report: Report, **options: Any) -> Shown:
        report.save_html(tmp_path / "report.html")
        contexts.append(browser.new_context(**{"viewport": {"width": 1300, "height": 900}, **options}))
        return Shown(contexts[-1], tmp_path / "report.html")

    yield show
    for context in contexts:
        context.close()


@pytest.fixture
def shown(open_page: Any, drawn_report: Report) -> Iterator[Shown]:
    found = open_page(drawn_report)
    yield found
    assert not found.errors
    assert [url for url in found.requests if not url.startswith("file:")] == []
    assert len(found.requests) == 1


def test_it_draws_and_shows_a_script_as_text(shown: Shown) -> None:
    assert shown.page.locator(".tile").count() == 5
    assert HOSTILE in shown.texts("#decisions tbody td")
    assert shown.page.locator("#decisions tbody tr").count() == 31
    painted = "c => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some((value) => value)"
    assert shown.page.locator("canvas.base").evaluate(painted)
    assert not shown.page.locator(".undrawn").is_visible()


def test_pointing_tells_and_clicking_pins(shown: Shown, drawn_report: Report) -> None:
    tip = shown.page.locator(".tip")
    assert not tip.is_visible()
    shown.over_chart(0.5, 0.3)
    assert tip.is_visible() and "device" in tip.inner_text()
    assert shown.page.locator("#live-title").inner_text().startswith("At the peak")
    before = shown.texts("#live-table tbody tr")
    timeline = drawn_report.timeline
    assert timeline is not None
    alive = [stay for stay in timeline.stays if stay.first <= timeline.peak < stay.last]
    other = bool(timeline.instants[timeline.peak].other_bytes)
    assert len(before) == min(len(alive) + other, 40)
    shown.over_chart(0.9, 0.3)
    shown.page.mouse.down()
    shown.page.mouse.up()
    assert shown.page.locator("#live-title").inner_text().startswith("At ")
    assert shown.texts("#live-table tbody tr") != before


def test_keys_move_the_moment(shown: Shown) -> None:
    chart = shown.page.get_by_role("slider")
    chart.focus()
    chart.press("Home")
    assert chart.get_attribute("aria-valuenow") == "0"
    chart.press("ArrowRight")
    assert chart.get_attribute("aria-valuenow") == "1"
    assert "on the device" in chart.get_attribute("aria-valuetext")
    chart.press("p")
    assert shown.page.locator("#live-title").inner_text().startswith("At the peak")
    chart.press("+")
    chart.press("0")


def test_decisions_sort_search_and_filter(shown: Shown, drawn_report: Report) -> None:
    names = "#decisions tbody tr td:nth-child(2)"
    bytes_head = shown.page.locator("#decisions th").first
    largest_first = [one.name for one in sorted(drawn_report.decisions, key=lambda one: -one.nbytes)]
    bytes_head.get_by_role("button").click()
    assert shown.texts(names)[0] == largest_first[0] == HOSTILE
    assert bytes_head.get_attribute("aria-sort") == "descending"
    bytes_head.get_by_role("button").press("Enter")
    assert shown.texts(names)[-1] == HOSTILE
    shown.page.get_by_role("button", name="offload 10").click()
    assert set(shown.texts("#decisions tbody .pill")) == {"offloaded"}
    assert len(shown.texts(names)) == 10
    shown.page.get_by_role("searchbox").fill("net.py:1")
    found = [one for one in drawn_report.decisions if one.decision == "offload" and "net.py:1" in one.source]
    assert 0 < len(found) < 10
    assert set(shown.texts(names)) == {one.name for one in found}
    total = sum(one.nbytes for one in found) / 2**20
    assert shown.texts("#decisions .told") == [f"{len(found)} of 31, {total:.1f} MiB"]


def test_bands_group_by_layer_or_decision(shown: Shown) -> None:
    assert any("other layer" in text for text in shown.texts(".legend button"))
    shown.page.get_by_role("button", name="by decision").click()
    assert {"kept", "offloaded", "recomputed", "arguments"} <= set(shown.texts(".legend button"))
    first = shown.page.locator(".legend button").first
    first.click()
    assert first.get_attribute("aria-pressed") == "true"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colors_follow_the_system_and_the_switch(open_page: Any, drawn_report: Report, scheme: str) -> None:
    shown = open_page(drawn_report, color_scheme=scheme)
    paper = "() => getComputedStyle(document.body).backgroundColor"
    light, dark = "rgb(246, 247, 249)", "rgb(15, 20, 26)"
    assert shown.page.evaluate(paper) == {"light": light, "dark": dark}[scheme]
    button = shown.page.locator("#theme")
    button.click()
    assert (button.inner_text(), shown.page.evaluate(paper)) == ("theme: light", light)
    button.click()
    assert (button.inner_text(), shown.page.evaluate(paper)) == ("theme: dark", dark)


def test_a_phone_needs_no_sideways_scrolling(open_page: Any, drawn_report: Report) -> None:
    shown = open_page(drawn_report, viewport={"width": 360, "height": 740})
    assert shown.page.evaluate("document.documentElement.scrollWidth") == 360


def test_without_memory_over_time_it_says_why(open_page: Any, report: Report) -> None:
    shown = open_page(report)
    assert "tells no schedule" in shown.page.locator("#memory").inner_text()
    assert shown.page.locator("#decisions tbody tr").count() == 30
    assert not shown.errors


def test_without_scripts_the_tables_stand(open_page: Any, drawn_report: Report) -> None:
    shown = open_page(drawn_report, java_script_enabled=False)
    assert shown.page.locator(".undrawn").is_visible()
    assert HOSTILE in shown.page.locator(".undrawn").inner_text()


def test_it_lets_no_other_script_run(shown: Shown) -> None:
    """What the policy forbids is forbidden even to someone who writes into the page."""
    run = "() => document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.ran = 1'}))"
    shown.page.evaluate(run)
    assert shown.page.evaluate("window.ran") is None
    assert len(shown.errors) == 1 and "Content Security Policy" in shown.errors.pop()


def test_several_live_in_one_notebook(browser: Any, drawn_report: Report, report: Report, tmp_path: Path) -> None:
    frames = drawn_report._repr_html_() + "<p class='tile'>mine</p>" + report._repr_html_()
    (tmp_path / "notebook.html").write_text(f"<!doctype html><meta charset=utf-8><body>{frames}", encoding="utf-8")
    context = browser.new_context()
    shown = Shown(context, tmp_path / "notebook.html")
    tiles = [frame.locator(".tile") for frame in shown.page.frames]
    tiles[1].first.wait_for()
    tiles[2].first.wait_for()
    assert [tile.count() for tile in tiles] == [1, 5, 5]
    assert shown.page.locator(".tile").evaluate("e => getComputedStyle(e).borderTopWidth") == "0px"
    assert not shown.errors
    context.close()


def test_ten_thousand_values(open_page: Any, drawn_report: Report) -> None:
    timeline = random_timeline(random.Random(3), 10_000, 10_000)
    decisions = tuple(replace(drawn_report.decisions[1], name=value.name) for value in timeline.values)
    shown = open_page(replace(drawn_report, timeline=timeline, decisions=decisions))
    shown.over_chart(0.5, 0.2)
    assert shown.page.locator("#decisions tbody tr").count() == 40
    shown.page.get_by_role("searchbox").fill("conv:7")
    assert "of 10000" in shown.texts("#decisions .told")[0]
    assert not shown.errors
