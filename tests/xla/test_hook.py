"""The hook acts on modules that are asked for, keeps errors for after, and is invisible to all others."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.program import compat
from memplan.xla import hook
from memplan.xla.module import Module
from memplan.xla.schema import UnreadableModuleError


def lowered(name: str) -> jax.stages.Lowered:
    def step(x: jax.Array) -> jax.Array:
        return jnp.sin(x) @ x

    step.__name__ = name
    return jax.jit(step).lower(jnp.ones((8, 8)))


def test_a_module_that_is_asked_for_is_given_in_its_order() -> None:
    modules: list[Module] = []

    def rewrite(module: Module) -> None:
        modules.append(module)

    with hook.intercept("jit_asked", rewrite, "cpu") as interception:
        lowered("another").compile()
        assert not interception.called
        lowered("asked").compile()
    lowered("asked").compile(compiler_options={"xla_cpu_enable_fast_math": False})
    interception.check()
    (module,) = modules
    assert module.name == "jit_asked"


def test_an_error_is_kept_and_the_module_goes_through() -> None:
    def rewrite(module: Module) -> Module:
        raise UnreadableModuleError("what is this?")

    with hook.intercept("jit_wrong", rewrite, "cpu") as interception:
        done = lowered("wrong").compile()
    with pytest.raises(UnreadableModuleError, match="what is this"):
        interception.check()
    assert done(jnp.ones((8, 8))).shape == (8, 8)


def test_a_module_that_cannot_be_written_is_an_error_too() -> None:
    def without_operands(module: Module) -> Module:
        ops = (op for op in module.entry.ops.values() if op.opcode != "parameter")
        return module.with_computations({**module, module.entry_name: module.entry.with_ops(ops)})

    with hook.intercept("jit_garbled", without_operands, "cpu") as interception:
        lowered("garbled").compile()
    with pytest.raises(KeyError):
        interception.check()


@pytest.fixture
def raises_on_ctrl_c() -> Iterator[None]:
    """Python's own handler, which a process that a shell starts in the background lacks."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("raises_on_ctrl_c")
def test_ctrl_c_in_a_callback_ends_the_compilation() -> None:
    """It would abort the process if it were raised into XLA."""

    def rewrite(module: Module) -> None:
        signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with hook.intercept("jit_broken_off", rewrite, "cpu") as interception:
        with pytest.raises(jax.errors.JaxRuntimeError):
            lowered("broken_off").compile()
        with pytest.raises(KeyboardInterrupt):
            interception.check()
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.usefixtures("raises_on_ctrl_c")
def test_ctrl_c_beside_a_callback_is_raised_in_the_next() -> None:
    read = list[str]()

    with hook.intercept("jit_pressed", lambda module: read.append(module.name), "cpu") as pressed:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(jax.errors.JaxRuntimeError):
            lowered("pressed").compile()
    assert isinstance(pressed.error, KeyboardInterrupt) and not read


@pytest.mark.usefixtures("raises_on_ctrl_c")
def test_ctrl_c_after_the_last_callback_is_raised_at_the_end() -> None:
    late = contextlib.ExitStack()
    interception = late.enter_context(hook.intercept("jit_late", lambda module: None, "cpu"))
    lowered("late").compile()
    signal.raise_signal(signal.SIGINT)
    interception.check()
    with pytest.raises(KeyboardInterrupt):
        late.close()


def test_a_handler_of_ctrl_c_that_raises_nothing_is_called() -> None:
    called = list[int]()
    before = signal.signal(signal.SIGINT, lambda number, frame: called.append(number))
    try:
        with hook.intercept(
            "jit_handled", lambda module: signal.raise_signal(signal.SIGINT), "cpu"
        ) as handled:
            lowered("handled").compile()
            signal.raise_signal(signal.SIGINT)
        handled.check()
    finally:
        signal.signal(signal.SIGINT, before)
    assert called == [signal.SIGINT] * 2


def test_who_asks_for_the_same_name_waits() -> None:
    order = list[str]()

    def second() -> None:
        with hook.intercept("jit_twice", lambda module: None, "cpu"):
            order.append("second")

    waiting = threading.Thread(target=second)
    with hook.intercept("jit_twice", lambda module: None, "cpu"):
        waiting.start()
        waiting.join(0.2)
        order.append("first")
    waiting.join()
    assert order == ["first", "second"]


@given(st.text(st.characters(codec="ascii", categories=("L", "N")), min_size=1, max_size=300))
def test_the_name_stands_in_front(name: str) -> None:
    name = f"jit_{name}"
    text = f"HloModule {name}\n\nENTRY e {{\n  ROOT a = f32[] parameter(0)\n}}\n"
    assert hook.module_name(compat.module_proto(text)) == name


@pytest.mark.parametrize("proto", [b"", b"\x12\x03abc", b"\x0a", b"\x0a\xff\xff\xff\xff\xff"])
def test_what_has_no_name_in_front_is_nobodys(proto: bytes) -> None:
    assert hook.module_name(proto) == ""
