"""The difference of two reports: matched buffers, growth, and tolerances."""

import json
import random
from dataclasses import replace
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.errors import ReportError
from memplan.report.difference import Change, Difference, Tolerance
from memplan.report.model import LiveValue, Report
from tests.report.plain import plain_report

MIB = 2**20
CONV = LiveValue("UNet/down_0/Conv_0", 8 * MIB, "float32[2,32,64]", "net.py:30", "")
TANH = LiveValue("loop_tanh_fusion.4{1}", 4 * MIB, "float32[2,16,64]", "net.py:31", "")
COPY = LiveValue("copy.12", 2 * MIB, "float32[512,1024]", "", "")
WEIGHT = LiveValue("state_params__w.1", 1 * MIB, "float32[512,512]", "argument", "")
EMPTY = plain_report()

names = st.sampled_from(
    ["UNet/Conv_0", "UNet/Conv_1", "fusion.3", "fusion.12{0}", "copy.9", "w.1", "x, an output"]
)
shapes = st.sampled_from(
    ["float32[2,4]", "float32[4,4]", "bfloat16[2,4]", "int32[]", "", "x[[", "float32[8]"]
)
sources = st.sampled_from(["net.py:3", "net.py:4", "/home/a/net.py:3", "loss.py:3", "argument", ""])
values = st.lists(
    st.builds(LiveValue, names, st.integers(1, 9), shapes, sources, st.just("")), max_size=12
)


def at_peak(
    report: Report, *values: LiveValue, other_bytes: int = 0, step_s: float | None = 0.1
) -> Report:
    """The report of a step with these buffers at its peak."""
    nbytes = sum(value.nbytes for value in values) + other_bytes
    return replace(report, live_at_peak=values, compiled_peak_bytes=nbytes, predicted_step_s=step_s)


def changes(report: Report, old: list[LiveValue], new: list[LiveValue]) -> tuple[Change, ...]:
    return Difference.of(at_peak(report, *old), at_peak(report, *new)).buffers


def test_a_report_equals_itself(report: Report) -> None:
    difference = Difference.of(report, report)
    assert difference.buffers == () and difference.old == difference.new
    assert Tolerance(0, 0).exceeded_by(difference) == ()
    assert [table.title for table in difference.tables(5)] == ["memplan: v100"]


@pytest.mark.parametrize(
    "moved",
    [
        replace(TANH, name="loop_tanh_fusion.17"),
        replace(TANH, name="loop_tanh_fusion.4.recompute1{2}"),
        replace(TANH, source="net.py:58"),
        replace(TANH, source="/home/someone/project/net.py:31"),
        replace(TANH, name="wrapped_tanh"),
        replace(TANH, shape="float32[32,64]"),
        replace(
            CONV, name=TANH.name, shape=TANH.shape, nbytes=TANH.nbytes, source="other/net.py:31"
        ),
    ],
)
def test_the_same_buffer_is_matched(report: Report, moved: LiveValue) -> None:
    assert (
        changes(
            report, [CONV, TANH, COPY, WEIGHT], [CONV, WEIGHT, moved, replace(COPY, name="copy")]
        )
        == ()
    )


def test_a_layer_is_matched_in_another_file(report: Report) -> None:
    assert changes(report, [CONV], [replace(CONV, source="models/blocks.py:7")]) == ()


def test_buffers_are_new_gone_larger_and_smaller(report: Report) -> None:
    doubled = replace(CONV, nbytes=16 * MIB, shape="float32[4,32,64]", source="net.py:33")
    halved = replace(WEIGHT, nbytes=MIB // 2, shape="bfloat16[512,512]")
    added = LiveValue("Head/Dense_0", 3 * MIB, "float32[3,512,512]", "net.py:50", "")
    difference = Difference.of(
        at_peak(report, CONV, COPY, WEIGHT), at_peak(report, halved, added, doubled)
    )
    assert difference.grown == (
        Change("larger", CONV.name, "net.py:33", CONV.shape, doubled.shape, 8 * MIB, 16 * MIB),
        Change("new", "Head/Dense_0", "net.py:50", "", "float32[3,512,512]", 0, 3 * MIB),
    )
    assert difference.shrunk == (
        Change("gone", "copy.12", "", COPY.shape, "", 2 * MIB, 0),
        Change(
            "smaller", WEIGHT.name, "argument", WEIGHT.shape, "bfloat16[512,512]", MIB, MIB // 2
        ),
    )
    assert difference.buffers == difference.grown + tuple(reversed(difference.shrunk))


def test_one_buffer_more_of_a_kind_is_new(report: Report) -> None:
    (more,) = changes(report, [CONV, TANH], [CONV, TANH, replace(TANH, name="loop_tanh_fusion.9")])
    assert (more.kind, more.more_bytes) == ("new", TANH.nbytes)


def test_instructions_without_a_line_match_only_their_shape(report: Report) -> None:
    second = replace(COPY, name="copy.3", shape="float32[9]", nbytes=36)
    assert [change.kind for change in changes(report, [COPY], [second])] == ["new", "gone"]
    assert changes(report, [COPY], [replace(COPY, name="transpose.1")]) == ()


@given(values, values, st.integers(0, 5), st.integers(0, 5))
def test_all_bytes_are_accounted_for(
    old: list[LiveValue], new: list[LiveValue], old_other: int, new_other: int
) -> None:
    before = at_peak(EMPTY, *old, other_bytes=old_other)
    after = at_peak(EMPTY, *new, other_bytes=new_other)
    difference = Difference.of(before, after)
    assert (difference.old.other_bytes, difference.new.other_bytes) == (old_other, new_other)
    more = sum(change.more_bytes for change in difference.buffers) + new_other - old_other
    assert more == difference.new.compiled_bytes - difference.old.compiled_bytes
    removed, added = (
        [change for change in difference.buffers if change.kind == kind] for kind in ("gone", "new")
    )
    assert len(old) - len(removed) == len(new) - len(added) >= 0
    assert list(difference.buffers) == sorted(
        difference.buffers, key=lambda change: -change.more_bytes
    )
    assert str(difference) and json.loads(difference.to_json())["new"]["other_bytes"] == new_other


@given(values, st.randoms(use_true_random=False))
def test_numbers_and_order_are_ignored(values: list[LiveValue], chance: random.Random) -> None:
    numbers = count(100)
    renamed = [
        replace(value, name=value.name.replace("fusion.3", f"fusion.{next(numbers)}"))
        for value in values
    ]
    chance.shuffle(renamed)
    assert changes(EMPTY, values, renamed) == ()


@given(values, values)
def test_growth_reversed_is_shrinkage(old: list[LiveValue], new: list[LiveValue]) -> None:
    forward = changes(EMPTY, old, new)
    back = changes(EMPTY, new, old)
    assert sum(change.more_bytes for change in forward) == -sum(
        change.more_bytes for change in back
    )
    assert len(forward) == len(back)


LAYERS = st.dictionaries(st.integers(0, 20), st.integers(1, 9))


@given(LAYERS, LAYERS)
def test_layers_are_compared_as_dictionaries_are(old: dict[int, int], new: dict[int, int]) -> None:
    """Independently: each layer has one buffer, whose shape is its bytes."""

    def buffers(layers: dict[int, int]) -> list[LiveValue]:
        return [
            LiveValue(f"net/{layer}", size, f"int8[{size}]", f"{layer}.py:1", "")
            for layer, size in layers.items()
        ]

    growth = {
        change.name: change.more_bytes for change in changes(EMPTY, buffers(old), buffers(new))
    }
    expected = {f"net/{layer}": new.get(layer, 0) - old.get(layer, 0) for layer in old | new}
    assert growth == {name: more for name, more in expected.items() if more}


def test_text_shows_figures_lines_and_other_differences(report: Report) -> None:
    layers = [replace(TANH, name=f"Net/layer_{number}", source="net.py:7") for number in range(3)]
    larger = [replace(layer, nbytes=6 * MIB, shape="float32[3,16,64]") for layer in layers]
    old = replace(
        at_peak(report, *layers, COPY), budget_bytes=4 * MIB, peak_kernel="Net/layer_2, net.py:7"
    )
    new = at_peak(report, *larger, step_s=0.2)
    text = " ".join(
        str(
            Difference.of(old, replace(new, versions=(("jax", "0.12"), ("python", "3.11.7"))))
        ).split()
    )
    assert "device peak 14.0 MiB 18.0 MiB +4.0 MiB +28.57 %" in text
    assert "step, predicted 100 ms 200 ms +100.00 %" in text
    assert "Grew at the peak: +6.0 MiB (1)" in text and "Shrank at the peak: -2.0 MiB (1)" in text
    assert "+6.0 MiB larger 3 x float32[2 -> 3,16,64] net.py:7 Net/layer_0, ..." in text
    assert "-2.0 MiB gone float32[512,1024] copy.12" in text
    assert "device budget 4.0 MiB 2.00 GiB" in text
    assert "runs at the peak Net/layer_2, net.py:7" in text
    assert "jax 0.10.2 0.12" in text and "python" not in text


def test_the_page_has_both_timelines_and_the_json_none(drawn_report: Report) -> None:
    difference = Difference.of(drawn_report, replace(drawn_report, predicted_step_s=0.5))
    assert difference.old.timeline == drawn_report.timeline
    document = json.loads(difference.to_json())
    assert "timeline" not in document["old"] and document["new"]["step_s"] == 0.5
    assert difference.to_html().count('"instants"') == 2
    assert difference._repr_html_().startswith("<iframe")


def test_long_lists_are_cut_and_say_so(report: Report) -> None:
    many = [LiveValue(f"net/{n}", n, f"int8[{n}]", f"{n}.py:1", "") for n in range(1, 31)]
    _, grown = Difference.of(at_peak(report), at_peak(report, *many)).tables(5)
    assert grown.title == "Grew at the peak: +465 B (the largest 5 of 30)"
    assert [row[0] for row in grown.rows] == ["+30 B", "+29 B", "+28 B", "+27 B", "+26 B"]
    assert set(grown.tones) == {"bad"}


def test_another_step_or_device_is_an_error(report: Report) -> None:
    named = replace(report, step="models.train:unet3d_step(size=64)")
    Difference.of(report, named).check_same()
    Difference.of(named, named).check_same()
    with pytest.raises(
        ReportError, match=r"another step: models\.train:unet3d_step\(size=64\), not a:b"
    ):
        Difference.of(named, replace(report, step="a:b")).check_same()
    with pytest.raises(ReportError, match="another device: v100, not a100"):
        Difference.of(report, replace(report, device="a100")).check_same()


def test_a_report_without_compiled_bytes_is_refused(report: Report) -> None:
    with pytest.raises(ReportError, match="a step on v100 has no compiled bytes"):
        Difference.of(report, replace(report, compiled_peak_bytes=None))


@pytest.mark.parametrize(("more", "said"), [(0, 0), (2, 0), (3, 1), (-50, 0)])
def test_bytes_may_rise_by_the_tolerance_and_no_more(report: Report, more: int, said: int) -> None:
    old, new = at_peak(report, other_bytes=100), at_peak(report, other_bytes=100 + more)
    risen = Tolerance(2, 5).exceeded_by(Difference.of(old, new))
    assert len(risen) == said
    assert all(
        "its compiled bytes rose by 3 %, from 100 B to 103 B (2 % are allowed)" in rise
        for rise in risen
    )


@pytest.mark.parametrize(
    ("old_s", "new_s", "said"), [(1.0, 1.04, 0), (1.0, 1.1, 1), (None, 9.0, 0), (0.0, 0.1, 1)]
)
def test_time_may_rise_by_the_tolerance_where_it_is_known(
    report: Report, old_s: float | None, new_s: float, said: int
) -> None:
    difference = Difference.of(at_peak(report, step_s=old_s), at_peak(report, step_s=new_s))
    risen = Tolerance(2, 5).exceeded_by(difference)
    assert len(risen) == said and all("its predicted time rose by" in rise for rise in risen)


@pytest.mark.parametrize("percent", [-1.0, float("nan")])
def test_a_tolerance_is_a_percentage(percent: float) -> None:
    with pytest.raises(ReportError, match="bytes is"):
        Tolerance(bytes=percent)
    with pytest.raises(ReportError, match="ms is"):
        Tolerance(ms=percent)
