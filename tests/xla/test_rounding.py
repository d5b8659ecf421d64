"""What keeps its last bits in another fusion: products that sums may take in, and sums in their order."""

from __future__ import annotations

import pytest

from memplan.xla.module import Computation, Instruction, read_instruction
from memplan.xla.rounding import is_product, narrowest, one_by_one, sums_alike

ARRAY = "f32[4]{0}"


def instructions(text: str) -> list[Instruction]:
    """From `m = multiply(a, b); s = add(m, c)`, of one shape."""
    found = list[Instruction]()
    for line in text.split("; "):
        name, _, rest = line.partition(" = ")
        opcode, _, operands = rest.rstrip(")").partition("(")
        given = ", ".join(f"%{one}" for one in operands.split(", "))
        found.append(read_instruction(f"  %{name} = {ARRAY} {opcode}({given})"))
    return found


def computed(text: str) -> Computation:
    """A computation of two parameters that ends so."""
    *before, last = [op.line for op in instructions(text)]
    given = [f"  %{name} = {ARRAY} parameter({number})" for number, name in enumerate("ab")]
    return Computation("f", "\n".join(["%f () -> () {", *given, *before, last.replace("  %", "  ROOT %", 1), "}"]))


@pytest.mark.parametrize(
    ("text", "product"),
    [
        ("r = multiply(a, b)", True),
        ("m = multiply(a, b); r = negate(m)", True),
        ("m = multiply(a, b); n = bitcast(m); o = negate(n); r = bitcast(o)", True),
        ("m = multiply(a, b); r = convert(m)", False),
        ("m = multiply(a, b); r = maximum(m, b)", False),
        ("r = divide(a, b)", False),
        ("r = bitcast(a)", False),
    ],
)
def test_a_product_is_one_behind_signs_and_bitcasts(text: str, product: bool) -> None:
    fused = computed(text)
    assert is_product(fused, fused.root) == product


def test_the_narrowest_arrays_are_those_of_the_fewest_bits() -> None:
    given = [
        read_instruction(f"  %{n} = {dtype}[4]{{0}} parameter({n})") for n, dtype in enumerate(("f32", "pred", "s4"))
    ]
    several = read_instruction("  %t = (f32[4]{0}, (bf16[4]{0}, f64[4]{0})) fusion(%0, %1), kind=kLoop, calls=%f")
    assert narrowest(several, given[:1]) == (32, 16)
    assert narrowest(several, given[:2]) == (8, 16)
    assert narrowest(given[0], given) == (4, 32)
    assert narrowest(several, [several]) == (16, 16)
    assert narrowest(given[1], []) == (0, 8)


def test_some_functions_are_read_for_one_by_one() -> None:
    opcodes = ["sine", "tanh", "cosine", "exponential", "tan", "multiply", "power", "log", "atan2", "rsqrt"]
    found = [opcode for opcode in opcodes if one_by_one(computed(f"m = {opcode}(a, b); r = add(m, b)"))]
    assert found == ["sine", "cosine", "tan", "power", "atan2"]


OTHERWISE = "n = multiply(a, b); w = broadcast(n); s = tanh(w)"


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("m = multiply(a, b); r = add(m, c)", "n = tanh(a)", True),
        ("m = multiply(a, b); r = add(m, c)", "n = multiply(a, b); s = add(n, c)", True),
        ("m = multiply(a, b); r = add(m, c)", "n = multiply(a, c); s = tanh(n)", True),
        ("m = multiply(a, b); r = add(m, c)", "n = multiply(a, b); s = tanh(n)", False),
        ("m = multiply(a, b); r = add(m, c)", "n = multiply(a, b); s = add(n, d)", False),
        ("m = multiply(a, b); r = subtract(m, c)", "n = multiply(a, b); s = add(n, c)", False),
        ("m = multiply(a, b); v = bitcast(m); r = add(v, c)", "n = multiply(a, b); s = tanh(n)", False),
        ("m = multiply(a, b); r = reduce(m, c)", "n = multiply(a, b); s = tanh(n)", False),
        ("m = multiply(a, b); r = negate(m)", "n = multiply(a, b); s = tanh(n)", False),
        ("m = multiply(a, b); r = tanh(m)", "n = multiply(a, b); s = exponential(n)", True),  # nobody adds it
        ("m = multiply(a, b); r = add(m, c)", "s = tanh(m)", False),  # the other reads it from the first
        ("m = multiply(a, b); r = add(m, c); t = tanh(m)", "n = multiply(a, b); s = tanh(n)", True),
        ("m = multiply(a, b); r = add(m, c)", "n = multiply(b, a); s = tanh(n)", False),
        ("m = multiply(a, b); v = broadcast(m); r = add(v, c)", OTHERWISE, False),
    ],
)
def test_sums_are_alike_where_nobody_else_reads_their_products(one: str, other: str, alike: bool) -> None:
    parts = [instructions(one), instructions(other)]
    names = {name: f"buffer of {name}" for name in "abcd"}
    assert sums_alike(parts, names) == alike
    assert "(m)" in other or sums_alike(parts[::-1], names) == alike


def test_what_is_read_under_two_names_is_one() -> None:
    parts = [instructions("m = multiply(a, b); r = add(m, c)"), instructions("n = multiply(d, b); s = tanh(n)")]
    assert sums_alike(parts, {"a": "one", "b": "two", "c": "three", "d": "four"})
    assert not sums_alike(parts, {"a": "one", "b": "two", "c": "three", "d": "one"})
