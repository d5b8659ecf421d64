"""The meaning of options."""

from pathlib import Path

import pytest

from tests.cli.command import Planner, message, run


@pytest.mark.parametrize(
    ("words", "option", "expected"),
    [
        ("workshop:make", "donate_argnums", (0,)),
        ("workshop:alone", "donate_argnums", ()),
        ("workshop:make --donate none", "donate_argnums", ()),
        ("workshop:make --donate 1", "donate_argnums", (1,)),
        ("workshop:make --donate 0,1", "donate_argnums", (0, 1)),
        ("workshop:make", "host_state", ()),
        ("workshop:make --host-state 0", "host_state", (0,)),
        ("workshop:make --host-state 0,1", "host_state", (0, 1)),
        ("workshop:make --host-state 1 --host-state 0", "host_state", (1, 0)),
        ("workshop:make --verify none", "verify", None),
    ],
)
def test_what_options_mean(planner: Planner, words: str, option: str, expected: object) -> None:
    assert run("inspect", *words.split()).exit_code == 0
    assert planner.requests[0][option] == expected


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--donate", "2"], "of the 2 arguments"),
        (["--donate", "state"], "does not name positions"),
        (["--host-state", "0,2"], "of the 2 arguments"),
        (["--host-state", ","], "does not name positions"),
        (["--verify", "twice"], "not one of compile, numbers, none"),
        (["--json", "no/such/folder/r.json"], "is not a writable folder"),
        (["--html", "."], "it is a folder"),
        (["--json", "same", "--html", "same"], "cannot hold both"),
        (["--html", "-"], "only JSON"),
    ],
)
def test_a_bad_option_is_a_usage_error(
    planner: Planner, workshop: Path, words: list[str], hint: str
) -> None:
    before = sorted(workshop.iterdir())
    assert hint in message(run("inspect", "workshop:make", *words), 2)
    assert [path for path in sorted(workshop.iterdir()) if path.name != "__pycache__"] == before
    assert not planner.requests
