"""The page as a browser shows it: whole, alone, and usable by pointer and keys."""

import random
from collections.abc import Iterator
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from memplan.report.difference import Difference
from memplan.report.mesh import CollectiveRow, Link, Mesh
from memplan.report.model import LiveValue, Report
from memplan.report.timeline import Block, Copy
from tests.report.timelines import HOSTILE, random_timeline

NOT_POSSIBLE = "\N{EN DASH}"


RECORD_DRAWING = """
    const { fillText, fillRect, clearRect } = CanvasRenderingContext2D.prototype;
    const forget = (canvas) => { canvas.texts = []; canvas.marks = []; };
    Object.assign(CanvasRenderingContext2D.prototype, {
      clearRect(...box) { forget(this.canvas); clearRect.apply(this, box); },
      fillText(text, x, y) { this.canvas.texts.push([text, x, y]); fillText.call(this, text, x, y); },
      fillRect(...box) { if (box[2] === 1 && box[3] === 16) this.canvas.marks.push(box); fillRect.apply(this, box); },
    });
"""
"""Keeps what the page last wrote and which trips it marked on each canvas."""


class Shown:
    """A page, with its console output and network requests."""

    def __init__(self, context: Any, file: Path):
        self.page = context.new_page()
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.errors.append(message.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on(
            "dialog", lambda box: self.errors.append(box.message or "dialog") or box.dismiss()
        )
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.add_init_script(RECORD_DRAWING)
        self.page.goto(file.as_uri())

    def texts(self, selector: str) -> list[str]:
        return self.page.locator(selector).all_inner_texts()

    def rows(self, table: str) -> list[str]:
        """The current rows of a table."""
        return self.texts(f"{table} tbody tr:not(.gap)")

    def column(self, heading: str) -> list[str]:
        """The cells of the decisions below a heading."""
        heads = [head.rstrip(" ↓↑") for head in self.texts("#decisions th")]
        return self.texts(f"#decisions tbody tr:not(.gap) td:nth-child({heads.index(heading) + 1})")

    def over_chart(self, right: float, down: float) -> None:
        """Point at a place of the chart, in shares of its sides."""
        box = self.page.locator("canvas.over").bounding_box()
        self.page.mouse.move(box["x"] + right * box["width"], box["y"] + down * box["height"])


def drawn_texts(shown: Shown) -> list[tuple[str, float, float]]:
    """The texts of the chart, with their places."""
    return shown.page.locator("canvas.base").evaluate("canvas => canvas.texts")


def trip_marks(shown: Shown) -> list[list[float]]:
    shown.page.evaluate("() => new Promise(requestAnimationFrame)")
    return shown.page.locator("canvas.base").evaluate("canvas => canvas.marks")


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[Any]:
    contexts = []

    def show(report: Report | Difference, **options: Any) -> Shown:
        report.save_html(tmp_path / "report.html")
        contexts.append(
            browser.new_context(**{"viewport": {"width": 1300, "height": 900}, **options})
        )
        return Shown(contexts[-1], tmp_path / "report.html")

    yield show
    for context in contexts:
        context.close()


@pytest.fixture
def shown(open_page: Any, drawn_report: Report) -> Iterator[Shown]:
    page = open_page(drawn_report)
    yield page
    assert not page.errors
    assert [url for url in page.requests if not url.startswith("file:")] == []
    assert len(page.requests) == 1


def test_it_draws_and_shows_a_script_as_text(shown: Shown) -> None:
    assert shown.texts(".tile h3") == ["Peak", "Saved", "Time", "Host"]
    assert HOSTILE in shown.texts("#decisions tbody td")
    assert shown.texts("#decisions .told") == ["31 of 31, 1.40 GiB"]
    painted = (
        "c => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some((value) => value)"
    )
    assert shown.page.locator("canvas.base").evaluate(painted)
    assert not shown.page.locator(".undrawn").is_visible()


def test_pointing_shows_and_clicking_pins(shown: Shown, drawn_report: Report) -> None:
    tip = shown.page.locator(".tip")
    assert not tip.is_visible()
    shown.over_chart(0.5, 0.3)
    assert tip.is_visible() and "device" in tip.inner_text()
    assert shown.page.locator("#live-title").inner_text().startswith("At the peak")
    before = shown.rows("#live-table")
    timeline = drawn_report.timeline
    alive = [stay for stay in timeline.stays if stay.first <= timeline.peak < stay.last]
    has_other = bool(timeline.instants[timeline.peak].other_bytes)
    assert f"{len(alive) + has_other} arrays" in shown.page.locator("#live-told").inner_text()
    shown.over_chart(0.9, 0.3)
    shown.page.mouse.down()
    shown.page.mouse.up()
    assert shown.page.locator("#live-title").inner_text().startswith("At ")
    assert shown.rows("#live-table") != before


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
    bytes_head = shown.page.locator("#decisions th").first
    assert bytes_head.get_attribute("aria-sort") == "descending"
    assert shown.column("value")[0] == HOSTILE
    bytes_head.get_by_role("button").press("Enter")
    assert bytes_head.get_attribute("aria-sort") == "ascending"
    assert shown.column("bytes")[:2] == ["0 B", "1.0 MiB"]
    shown.page.get_by_role("button", name="offload 10").click()
    assert set(shown.texts("#decisions tbody .pill")) == {"offloaded"}
    assert len(shown.column("value")) == 10
    shown.page.get_by_role("searchbox").fill("net.py:1")
    offloaded = [decision for decision in drawn_report.decisions if decision.decision == "offload"]
    decisions = [decision for decision in offloaded if "net.py:1" in decision.source]
    assert 0 < len(decisions) < 10
    assert set(shown.column("value")) == {decision.name for decision in decisions}
    total = sum(decision.nbytes for decision in decisions) / 2**20
    assert shown.texts("#decisions .told") == [f"{len(decisions)} of 31, {total:.1f} MiB"]


def test_a_decision_shows_the_costs_of_its_alternatives(shown: Shown) -> None:
    shown.page.get_by_role("button", name="recompute 10").click()
    assert set(shown.column("keep")) == {"+1.0 MiB"} and set(shown.column("recompute")) == {"+1 ms"}
    assert set(shown.column("host")) == {NOT_POSSIBLE}
    table = shown.page.get_by_role("region", name="Decisions")
    table.focus()
    table.press("ArrowDown")
    said = shown.page.locator("#decisions .note").inner_text()
    assert (
        "keep: the peak rises by 1.0 MiB; recompute: kernels take 1 ms; host: not possible: no link"
        in said
    )
    assert shown.page.locator("#decisions tr[aria-selected=true]").count() == 1
    shown.page.get_by_role("button", name="offload 10").click()
    assert set(shown.column("host")) == {"hidden"}
    shown.page.get_by_role("button", name="keep 11").click()
    assert set(shown.column("recompute")) == {NOT_POSSIBLE} and set(shown.column("host")) == {
        "+500 µs"
    }


def test_every_control_is_reached_by_keys_and_shows_it(shown: Shown) -> None:
    """Tab visits all controls, and the focused one has an outline."""
    controls = "[...document.querySelectorAll('button, select, input, [tabindex]')]"
    wanted = shown.page.evaluate(
        f"() => {controls}.filter((element) => element.checkVisibility()).length"
    )
    reached = []
    for _ in range(wanted):
        shown.page.keyboard.press("Tab")
        reached.append(
            shown.page.evaluate(
                "() => { const all = [...document.querySelectorAll('*')], at = document.activeElement;"
                " return [all.indexOf(at), getComputedStyle(at).outlineStyle]; }"
            )
        )
    assert len({index for index, _ in reached}) == wanted
    assert {style for _, style in reached} == {"solid"}


def test_bands_group_by_layer_or_decision(shown: Shown) -> None:
    assert any("other layer" in text for text in shown.texts(".legend button"))
    shown.page.get_by_role("button", name="by decision").click()
    assert {"kept", "offloaded", "recomputed", "arguments"} <= set(shown.texts(".legend button"))
    first = shown.page.locator(".legend button").first
    first.click()
    assert first.get_attribute("aria-pressed") == "true"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colors_follow_the_system_and_the_switch(
    open_page: Any, drawn_report: Report, scheme: str
) -> None:
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
    exports = ("export XLA_" + "X" * 60 + "=1",)
    named = replace(drawn_report, step="models.train:resnet_step(batch=64)", exports=exports)
    for result in (named, Difference.of(named, named)):
        shown = open_page(result, viewport={"width": 360, "height": 740})
        assert shown.page.evaluate("document.documentElement.scrollWidth") == 360
        parts = ("h1", ".tile", ".chart", ".controls")
        boxes = [shown.page.locator(part).first.bounding_box() for part in parts]
        tops = [box["y"] for box in boxes]
        assert tops == sorted(tops)


def test_without_memory_over_time_it_says_why(open_page: Any, report: Report) -> None:
    shown = open_page(report)
    assert "tells no schedule" in shown.page.locator("#memory").inner_text()
    assert shown.texts("#decisions .told") == ["30 of 30, 435.0 MiB"]
    assert not shown.errors


def test_without_scripts_the_tables_stand(open_page: Any, drawn_report: Report) -> None:
    shown = open_page(drawn_report, java_script_enabled=False)
    assert shown.page.locator(".undrawn").is_visible()
    assert HOSTILE in shown.page.locator(".undrawn").inner_text()


def test_it_lets_no_other_script_run(shown: Shown) -> None:
    """The policy holds even for scripts that are written into the page."""
    run = "() => document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.ran = 1'}))"
    shown.page.evaluate(run)
    assert shown.page.evaluate("window.ran") is None
    assert len(shown.errors) == 1 and "Content Security Policy" in shown.errors.pop()


def test_several_live_in_one_notebook(
    browser: Any, drawn_report: Report, report: Report, tmp_path: Path
) -> None:
    difference = Difference.of(report, drawn_report)._repr_html_()
    frames = (
        drawn_report._repr_html_() + "<p class='tile'>mine</p>" + report._repr_html_() + difference
    )
    (tmp_path / "notebook.html").write_text(
        f"<!doctype html><meta charset=utf-8><body>{frames}", encoding="utf-8"
    )
    context = browser.new_context()
    shown = Shown(context, tmp_path / "notebook.html")
    tiles = [frame.locator(".tile") for frame in shown.page.frames]
    for tile in tiles[1:]:
        tile.first.wait_for()
    assert [tile.count() for tile in tiles] == [1, 4, 4, 4]
    assert shown.page.locator(".tile").evaluate("e => getComputedStyle(e).borderTopWidth") == "0px"
    assert not shown.errors
    context.close()


def test_figures_at_the_top_are_of_the_plan(shown: Shown) -> None:
    peak, saved, time, host = shown.texts(".tile")
    assert "1.76 GiB" in peak and "87.9 % of the budget" in peak and "by XLA's account" in peak
    assert "3.99 GiB" in saved and "69.4 % of the unmodified step's 5.74 GiB" in saved
    assert "250 ms" in time and "+19 % against 210 ms unmodified" in time
    assert host.count("1.34 GiB") == 2


def test_an_unmodified_step_saves_nothing(open_page: Any, drawn_report: Report) -> None:
    shown = open_page(replace(drawn_report, planner="none"))
    assert shown.texts(".tile")[1].splitlines()[-1] == "the step runs as it is"
    assert shown.texts(".tile strong")[1] == "0 B"


@pytest.mark.parametrize(
    ("names", "title"),
    [
        ({"step": "train:step(size=2)", "function": "train_step"}, "train:step(size=2)"),
        ({"function": "train_step"}, "train_step"),
        ({"function": HOSTILE}, HOSTILE),
        ({}, "step"),
    ],
)
def test_the_title_is_the_step(
    open_page: Any, drawn_report: Report, names: dict[str, str], title: str
) -> None:
    shown = open_page(replace(drawn_report, **names))
    assert shown.texts("h1") == [title]
    assert shown.texts(".subtitle") == [f"budget 2.00 GiB on {drawn_report.device}"]
    assert shown.page.title() == f"{title}, budget 2.00 GiB on {drawn_report.device}"


def test_launches_and_pinned_regions_are_in_the_table(open_page: Any, drawn_report: Report) -> None:
    pinned = {"pinned_bytes": 3 << 30, "pinned_regions_bytes": (2 << 30, 1 << 30)}
    shown = open_page(replace(drawn_report, cuda_graphs=3, single_launches=7, **pinned))
    cells = shown.texts("section td")
    assert "3.00 GiB, in 2 regions: 2.00 GiB, 1.00 GiB" in cells
    assert "3 CUDA graphs, 7 kernels and copies outside of them" in cells


def test_a_mesh_has_collectives_with_lines_layers_and_links(
    open_page: Any, drawn_report: Report
) -> None:
    end_s = drawn_report.timeline.end_s
    gather = Copy("Net/conv_0", 7, "to devices", 0.0, 2e-4, "all-gather", ("host",), "net.py:3")
    sums = Copy("Net", 9, "to devices", 2e-4, 3e-4, "all-reduce", ("device",), "net.py:5")
    timeline = replace(drawn_report.timeline, copies=(*drawn_report.timeline.copies, gather, sums))
    gathers = (CollectiveRow("all-gather", ("host",), 1, 5, 7, end_s),)
    links = (Link("host", 2, 40e9, True), Link("device", 4, 360e9, False))
    mesh = Mesh((("data", 8),), "2x4", links, gathers, 0.1, 0.05)
    shown = open_page(replace(drawn_report, timeline=timeline, mesh=mesh))
    assert {"over host", "over device"} <= {text for text, *_ in drawn_texts(shown)}
    assert {"all-gather", "all-reduce"} <= set(shown.texts(".legend span"))
    assert shown.texts(".subtitle") == [
        f"budget 2.00 GiB on each {drawn_report.device} of mesh data 8"
    ]
    assert [row.split("\t") for row in shown.rows("#collectives")] == [
        ["200 µs", "all-gather", "7 B", "host", "Net/conv_0", "net.py:3"],
        ["100 µs", "all-reduce", "9 B", "device", "Net", "net.py:5"],
    ]
    over = shown.page.locator("#collectives tbody td:nth-child(4)").first
    assert over.get_attribute("title") == "host: 40.0 GB/s"
    pixels = "canvas => canvas.toDataURL()"
    unmarked = shown.page.locator("canvas.over").evaluate(pixels)
    over.hover()
    assert shown.page.locator("canvas.over").evaluate(pixels) != unmarked
    assert not shown.errors
    assert not open_page(drawn_report).page.locator("#collectives").is_visible()


def test_a_long_loop_shows_its_trips_and_seconds(open_page: Any, drawn_report: Report) -> None:
    end_s = drawn_report.timeline.end_s
    loop = Block("loop", "while.19", 2000, 0.0, end_s, "a/net.py:3")
    shown = open_page(
        replace(drawn_report, timeline=replace(drawn_report.timeline, blocks=(loop,)))
    )
    texts = {text for text, *_ in drawn_texts(shown)}
    (label,) = (text for text in texts if "2,000 trips" in text)
    assert label.startswith("net.py:3: 2,000 trips of ") and label.endswith(" ms")
    assert "2,000 \N{MULTIPLICATION SIGN}" in texts
    chart = shown.page.get_by_role("slider")
    few = len(trip_marks(shown))
    assert 20 < few < 300
    assert "in 2,000 trips, " in shown.page.locator("#live-told").inner_text()
    chart.focus()
    for _ in range(9):  # to a span of four trips
        chart.press("+")
    assert 1 <= len(trip_marks(shown)) <= 5
    assert not shown.errors


@pytest.mark.parametrize(("times", "is_smaller"), [(4, False), (40, True)])
def test_the_host_has_the_scale_of_the_device_or_says_how_much_smaller(
    open_page: Any, drawn_report: Report, times: int, is_smaller: bool
) -> None:
    """Bytes of a pixel, by the ticks of the axes."""
    timeline = drawn_report.timeline
    on_host = {stay.value for stay in timeline.stays if stay.place == "host"}
    values = tuple(
        replace(value, nbytes=value.nbytes * times) if index in on_host else value
        for index, value in enumerate(timeline.values)
    )
    instants = tuple(
        replace(instant, host_bytes=instant.host_bytes * times) for instant in timeline.instants
    )
    shown = open_page(
        replace(drawn_report, timeline=replace(timeline, values=values, instants=instants))
    )
    ticks = [(text, y) for text, _, y in drawn_texts(shown) if text.endswith("GiB") or text == "0"]
    ticks = [(float(text.split()[0]), y) for text, y in ticks if len(text.split()) <= 2]
    second = [text for text, _ in ticks].index(0, 1)
    device, host = ticks[:second], ticks[second:]
    scales = [(low[1] - high[1]) / (high[0] - low[0]) for low, high in (device[:2], host[:2])]
    ratio = scales[0] / scales[1]
    (name,) = {text for text, *_ in drawn_texts(shown) if text.startswith("host, at most")}
    notes = shown.page.inner_text("#memory")
    assert ("drawn 1/" in name) is is_smaller
    if not is_smaller:
        assert (
            ratio == pytest.approx(1, abs=0.03) and "host's memory has the device's scale" in notes
        )
        return
    shrink = int(name.partition("1/")[2].split()[0])
    assert shrink > 1 and ratio == pytest.approx(shrink, rel=0.03)
    assert f"The host's memory is drawn 1/{shrink} as high as the device's." in notes


def test_the_unmodified_step_is_shown_on_request(shown: Shown) -> None:
    box = shown.page.get_by_label("show the unmodified step")
    assert box.is_checked()
    pixels = "canvas => canvas.toDataURL()"
    before = shown.page.locator("canvas.base").evaluate(pixels)
    box.uncheck()
    shown.page.evaluate("() => new Promise(requestAnimationFrame)")
    assert shown.page.locator("canvas.base").evaluate(pixels) != before


@pytest.mark.parametrize("count", [10_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_a_long_table_has_only_its_visible_rows(
    open_page: Any, drawn_report: Report, count: int
) -> None:
    timeline = random_timeline(random.Random(3), count, count)
    decisions = tuple(
        replace(drawn_report.decisions[1], name=value.name) for value in timeline.values
    )
    shown = open_page(replace(drawn_report, timeline=timeline, decisions=decisions))
    max_frames = 40  # some 15 are seen
    shown.over_chart(0.5, 0.2)
    assert (
        10 < len(shown.rows("#decisions")) < max_frames
        and len(shown.rows("#live-table")) < max_frames
    )
    table = shown.page.get_by_role("region", name="Decisions")
    assert table.locator("table").get_attribute("aria-rowcount") == str(count + 1)
    before = shown.rows("#decisions")
    table.evaluate("box => { box.scrollTop = box.scrollHeight / 2; }")
    shown.page.wait_for_function("() => document.querySelectorAll('#decisions .gap').length === 2")
    assert shown.rows("#decisions") != before and len(shown.rows("#decisions")) < max_frames
    table.focus()
    table.press("End")
    last = table.locator("tr[aria-selected=true]")
    assert last.get_attribute("aria-rowindex") == str(count + 1) and last.is_visible()
    assert len(shown.rows("#decisions")) < max_frames
    shown.page.get_by_role("searchbox").fill("conv:7")
    assert f"of {count}" in shown.texts("#decisions .told")[0]
    assert not shown.errors


def test_a_chart_of_many_instants_draws_the_highest_of_each_pixel(browser: Any) -> None:
    """Independently: the rows that a column covers, one by one."""
    source = (resources.files("memplan.report") / "assets" / "levels.js").read_text(
        encoding="utf-8"
    )
    context = browser.new_context()
    fetched = context.new_page().evaluate(
        "() => {"
        + source
        + """
          let state = 7;
          const random = () => (state = (state * 16807) % 2147483647) / 2147483647;
          for (const count of [1, 2, 3, 7, 64, 1000]) {
            const figures = Array.from({ length: count }, () => Math.floor(random() * 9));
            const steps = new Steps(figures.map((_, i) => i), count, figures);
            for (let k = 0; k < 50; k += 1) {
              const [a, b] = [random() * count, random() * count].sort((x, y) => x - y);
              for (const { row, first, last } of steps.columns(a, b, 10)) {
                const among = figures.slice(first, last + 1);
                if (row !== first + among.indexOf(Math.max(...among))) return [count, first, last, row];
              }
              const alone = steps.columns(a, b, 10).every((one) => one.first === one.last);
                  if (Math.floor(b) - Math.floor(a) < 10 !== alone) return [count, a, b];
            }
            const spans = new Spans(figures.map((figure, i) => ({ start_s: i, end_s: i + figure / 10 })));
            const drawn = spans.columns(0, count, 20);
            if (drawn.length > 41 || drawn[0].from !== 0) return ["spans", count, drawn.length];
          }
          return "as one by one";
        }"""
    )
    context.close()
    assert fetched == "as one by one"


@pytest.fixture
def grown(drawn_report: Report) -> Difference:
    """Two reports; of the buffers, one is larger, one gone and one new."""
    values = tuple(
        LiveValue(f"Net/{n}", n << 20, f"float32[{n}]", f"net.py:{n}", "") for n in range(1, 9)
    )
    larger = replace(values[0], nbytes=5 << 20, shape="float32[5]")
    new = larger, *values[2:], LiveValue(HOSTILE, 99 << 20, "", "", "")
    later = replace(
        drawn_report, timeline=random_timeline(random.Random(8), 30, 40), live_at_peak=new
    )
    return Difference.of(replace(drawn_report, live_at_peak=values), later)


def test_a_difference_shows_both_steps_and_the_changes(open_page: Any, grown: Difference) -> None:
    shown = open_page(grown)
    assert shown.page.get_by_role("slider").count() == 2
    rows = [row.split("\t") for row in shown.rows("#buffers")]
    assert [row[:4] for row in rows] == [
        ["+99.0 MiB", "new", "0 B", "99.0 MiB"],
        ["+4.0 MiB", "larger", "1.0 MiB", "5.0 MiB"],
        ["\N{MINUS SIGN}2.0 MiB", "gone", "2.0 MiB", "0 B"],
    ]
    assert rows[0][-1] == HOSTILE and rows[1][-2:] == ["net.py:1", "Net/1"]
    assert "float32[1] \u2192 float32[5]" in rows[1]
    shown.page.get_by_role("button", name="gone 1").click()
    assert len(shown.rows("#buffers")) == 1
    first, second = shown.page.get_by_role("slider").all()
    top, below = first.bounding_box(), second.bounding_box()
    assert (
        top["y"] + top["height"] <= below["y"]
        and top["x"] == below["x"]
        and top["width"] == below["width"]
    )
    assert len(shown.requests) == 1 and not shown.errors


def test_both_steps_are_moved_together(open_page: Any, grown: Difference) -> None:
    shown = open_page(grown)
    pixels = (
        "() => [...document.querySelectorAll('canvas.base')].map((canvas) => canvas.toDataURL())"
    )
    whole = shown.page.evaluate(pixels)
    chart = shown.page.get_by_role("slider").nth(1)
    chart.focus()
    chart.press("+")
    shown.page.evaluate("() => new Promise(requestAnimationFrame)")
    near = shown.page.evaluate(pixels)
    assert near[0] != whole[0] and near[1] != whole[1]
    chart.press("0")
    shown.page.evaluate("() => new Promise(requestAnimationFrame)")
    assert shown.page.evaluate(pixels) == whole
    chart.press("Home")
    assert "now, at 0 s: " in shown.page.locator("#memory [role=status]").last.inner_text()


def test_a_page_without_differences_says_so(open_page: Any, drawn_report: Report) -> None:
    shown = open_page(Difference.of(drawn_report, drawn_report))
    assert "both hold the same" in shown.page.locator("#buffers").inner_text()
    assert shown.texts(".status") == ["as before"] and not shown.errors


def test_a_difference_without_memory_over_time_has_its_buffers(
    open_page: Any, grown: Difference
) -> None:
    shown = open_page(replace(grown, old=replace(grown.old, timeline=None)))
    assert shown.page.get_by_role("slider").count() == 1
    assert "as it was before has no memory over time" in shown.page.locator("#memory").inner_text()
    bare = open_page(
        replace(grown, old=replace(grown.old, timeline=None), new=replace(grown.new, timeline=None))
    )
    assert "Neither report has memory over time" in bare.page.locator("#memory").inner_text()
    assert len(bare.rows("#buffers")) == 3 and not (shown.errors or bare.errors)
