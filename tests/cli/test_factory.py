"""MODULE:FACTORY: the call, and one clear message for each error."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from memplan.cli import factory
from tests.cli.command import Planner, message, run


def test_a_reference_has_one_form() -> None:
    first, second = (
        factory.parse(call)
        for call in ("a.b:f(size=(2, 3), dtype='x')", "a.b:f( dtype = 'x', size=(2,3) )")
    )
    assert str(first) == str(second) == "a.b:f(dtype='x', size=(2, 3))"
    assert factory.parse(str(first)) == first and str(factory.parse("a.b:f()")) == "a.b:f"


def test_factory_arguments_are_literals(planner: Planner) -> None:
    call = "workshop:make(size=(2, 3), name='a:b(c)', deep={'x': [1, -2.5, None, True]})"
    assert run("inspect", call).exit_code == 0
    assert planner.args[0] == {"w": (2, 3), "name": "a:b(c)", "deep": {"x": [1, -2.5, None, True]}}


@pytest.mark.parametrize(
    ("reference", "hint"),
    [
        ("workshop", "does not name a factory"),
        ("work shop:make", "does not name a factory"),
        ("workshop:make(", "is not a call"),
        ("workshop:make(1)", "without its name"),
        ("workshop:make(**{'a': 1})", "unpacks a mapping"),
        ("workshop:make(size=open('x'))", "is not a literal"),
        ("workshop:make(size=__import__('os').getcwd())", "is not a literal"),
        ("workshop:make + 1", "is not the name of a factory"),
        ("nowhere_at_all:make", "The module 'nowhere_at_all' is neither"),
        ("workshop.inner:make", "The module 'workshop.inner' is neither"),
        ("broken:make", "imports 'no_such_thing_at_all', which is not installed"),
        ("raising:make", "failed with ValueError: at import"),
        ("leaving:make", "failed with SystemExit"),
        ("workshop:mak", "Did you mean make?"),
        ("workshop:made", "is a int, not a function"),
        ("workshop:alone(size=2)", "unexpected keyword argument"),
        ("workshop:angry", "failed with RuntimeError: no data here"),
        ("workshop:none", "returned a NoneType"),
        ("workshop:three", "returned a tuple of length 3"),
        ("workshop:no_step", "returned a int as its step"),
        ("workshop:no_args", "returned a dict as its args"),
    ],
)
def test_a_bad_factory_is_a_usage_error(planner: Planner, reference: str, hint: str) -> None:
    assert hint in message(run("inspect", reference), 2)
    assert not planner.requests


def test_the_current_directory_is_importable_once(workshop: Path) -> None:
    reference = factory.parse("workshop:make")
    factory.load(reference)
    factory.load(replace(reference, name="alone"))
    assert sys.path.count(str(workshop)) == 1
