"""What is read from a profile, and interval arithmetic, exact."""

from types import SimpleNamespace
from typing import Any

from experiments.gpu.trace import copies, events, kernels, overlap


def test_a_copy_beside_kernels_is_not_hidden() -> None:
    assert overlap([(0.0, 1.0)], [(1.0, 2.0)]) == 0


def test_only_the_covered_part_counts_once() -> None:
    copied = [(0.0, 4.0), (2.0, 6.0)]  # their union is 6 long
    computed = [(1.0, 3.0), (2.5, 3.5), (5.0, 9.0)]
    assert overlap(copied, computed) == 3.5


def test_nothing_to_hide() -> None:
    assert overlap([], [(0.0, 1.0)]) == 0


def test_kernels_and_copies_are_told_apart_in_the_lines_of_streams() -> None:
    # As XLA's CUPTI collector writes them; lines of other names repeat the same time by module and by step.
    copy = _event("MemcpyD2H", memcpy_details="kind_src:device kind_dst:pinned size:4096 dest:0 async:1")
    kernel, fill = _event("loop_add_fusion", hlo_op="fusion.3"), _event("Memset")
    card = _plane("/device:GPU:0", {"Stream #13(MemcpyD2H)": [copy], "Stream #7": [kernel, fill], "XLA Ops": [kernel]})
    found = events(SimpleNamespace(planes=[card, _plane("/host:CPU", {"Stream #1": [kernel]})]))
    assert [(one.op, one.span) for one in kernels(found)] == [("fusion.3", (1.0, 3.0))]
    assert [one.nbytes for one in copies(found, "D2H")] == [4096]
    assert copies(found, "H2D") == []


def _event(name: str, **stats: str) -> Any:
    return SimpleNamespace(name=name, start_ns=1e9, duration_ns=2e9, stats=list(stats.items()))


def _plane(name: str, lines: dict[str, list[Any]]) -> Any:
    return SimpleNamespace(name=name, lines=[SimpleNamespace(name=line, events=found) for line, found in lines.items()])
