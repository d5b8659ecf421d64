"""Curves: tables, JSON and pictures."""

from pathlib import Path

import pytest

from memplan.report.curve import MEMPLAN, XLA, Curve, Point

GIB = 2**30


@pytest.fixture
def curve() -> Curve:
    points = (
        Point("plain jax", None, 10 * GIB, 0, 0.1),
        Point("jax.checkpoint, nothing saved", None, None, None, None, "does not compile"),
        Point(MEMPLAN, 8 * GIB, 7 * GIB, GIB, 0.11),
        Point(XLA, 8 * GIB, 8 * GIB, 0, 0.12),
        Point(MEMPLAN, 4 * GIB, None, None, None, "nothing that fits was found"),
    )
    return Curve(points, "v100", 10 * GIB, 0.1, 3 * GIB, (("jax", "0.11.2"),))


def test_text_has_the_slowdown_of_a_step(curve: Curve) -> None:
    text = str(curve)
    assert "floor 3.00 GiB" in text
    assert "+10.0%" in text and "+20.0%" in text
    assert "nothing that fits was found" in text


def test_the_picture_is_a_whole_png(curve: Curve, tmp_path: Path) -> None:
    curve.save_png(tmp_path / "curve.png")
    drawn = (tmp_path / "curve.png").read_bytes()
    assert drawn.startswith(b"\x89PNG\r\n") and drawn.rstrip().endswith(b"IEND\xaeB`\x82")
    assert [path.name for path in tmp_path.iterdir()] == ["curve.png"]
