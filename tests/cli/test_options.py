"""The meaning of options."""

from pathlib import Path

import pytest

from tests.cli.command import Planner, message, run


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
    assert planner.requests[0]["donate_argnums"] == donated


@pytest.mark.parametrize(
    ("words", "on_host"),
    [
        ([], ()),
        (["--host-state", "0"], (0,)),
        (["--host-state", "0,1"], (0, 1)),
        (["--host-state", "1", "--host-state", "0"], (1, 0)),
    ],
)
def test_state_on_the_host(planner: Planner, words: list[str], on_host: tuple[int, ...]) -> None:
    assert run("inspect", "workshop:make", *words).exit_code == 0
    assert planner.requests[0]["host_state"] == on_host


def test_verify_none_is_none(planner: Planner) -> None:
    assert run("inspect", "workshop:make", "--verify", "none").exit_code == 0
    assert planner.requests[0]["verify"] is None


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
def test_a_bad_option_is_a_usage_error(planner: Planner, workshop: Path, words: list[str], hint: str) -> None:
    before = sorted(workshop.iterdir())
    assert hint in message(run("inspect", "workshop:make", *words), 2)
    assert [path for path in sorted(workshop.iterdir()) if path.name != "__pycache__"] == before
    assert not planner.requests
