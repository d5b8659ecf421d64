"""Steps of every kind that jax.jit accepts, tiny; and plans made by hand."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from memplan.program.trace import Program, trace

X = np.arange(6, dtype=np.float32).reshape(2, 3) / 4


@dataclass(frozen=True)
class Case:
    """A step with its arguments, made anew for every use, and its `jax.jit` options."""

    step: Callable[..., Any]
    make: Callable[[], tuple[Any, ...]] = lambda: (jnp.asarray(X),)
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


def traced(case: Case) -> Program:
    return trace(case.step, case.make(), case.kwargs, case.options)


@jax.custom_jvp
def tripled_tangent(x: Any) -> Any:
    return jnp.sin(x)


tripled_tangent.defjvp(lambda primals, tangents: (tripled_tangent(primals[0]), 3 * tangents[0]))


@jax.custom_vjp
def scaled(x: Any, by: Any) -> Any:
    return jnp.sin(x) * by


scaled.defvjp(
    lambda x, by: (scaled(x, by), (x, by)),
    lambda kept, cotangent: (cotangent * 5, np.zeros(np.shape(kept[1]), jax.dtypes.float0)),
)


def dropout(key: jax.Array, x: jax.Array) -> Any:
    mask_key, next_key = jax.random.split(key)
    return jnp.where(jax.random.bernoulli(mask_key, 0.5, x.shape), x, 0), next_key


def written_in_place(x: jax.Array) -> jax.Array:
    ref = jax.new_ref(x)
    ref[...] += 1

    def body(index: Any, carry: Any) -> Any:
        ref[index % 2] = ref[1] + carry
        return carry + 1

    jax.lax.fori_loop(0, 3, body, 1.0)
    return jax.freeze(ref)


def one_device() -> Mesh:
    return Mesh(np.array(jax.devices()[:1]), ("d",))


def sharded(*spec: Any) -> NamedSharding:
    return NamedSharding(one_device(), PartitionSpec(*spec))


def mapped(x: jax.Array) -> jax.Array:
    inner = jax.shard_map(
        lambda part: jax.lax.psum(part, "d"),
        mesh=one_device(),
        in_specs=PartitionSpec("d"),
        out_specs=PartitionSpec(),
    )
    return inner(jnp.sin(x)) * 2


def cases() -> dict[str, Case]:
    x, ints = jnp.asarray(X), jnp.arange(3)
    table = jnp.ones((3, 4))
    words = np.ones((3, 4), np.float32)
    return {
        "pytrees": Case(
            lambda d: {"a": d["a"] + 1, "b": (d["b"], None, [2 * d["c"]])}, lambda: ({"a": x, "b": ints, "c": x},)
        ),
        "static number": Case(lambda n, x: n * x, lambda: (3, x), options={"static_argnums": 0}),
        "static last": Case(lambda x, n: n * x, lambda: (x, 3), options={"static_argnums": -1}),
        "static name": Case(lambda x, *, n: n * x, kwargs={"n": 3}, options={"static_argnames": "n"}),
        "static among many": Case(
            lambda x, *more, on: sum(more, x) if on else x,
            lambda: (x, x, x),
            {"on": True},
            {"static_argnames": "on"},
        ),
        "donated": Case(lambda s, x: (s + x, x.sum()), lambda: (x + 0, x), options={"donate_argnums": 0}),
        "donated by name": Case(lambda x, s: s + x, lambda: (x,), {"s": X}, {"donate_argnames": "s"}),
        "shardings": Case(
            lambda x: x * 2 + 1, options={"in_shardings": sharded("d"), "out_shardings": sharded()}
        ),
        "inner sharding": Case(lambda x: jax.jit(lambda y: 2 * y, out_shardings=sharded("d"))(x) + 1),
        "sharding constraint": Case(lambda x: jax.lax.with_sharding_constraint(x * 2, sharded("d")) + 1),
        "nested jit": Case(lambda x: jax.jit(lambda y: jax.jit(jnp.sin)(y) * 2)(x) + 1),
        "custom_jvp": Case(lambda x: (tripled_tangent(x), jax.grad(lambda x: tripled_tangent(x).sum())(x))),
        "custom_vjp": Case(lambda x, n: jax.value_and_grad(lambda x: scaled(x, n).sum())(x), lambda: (x, 2)),
        "float0": Case(
            lambda x, n: jax.grad(lambda x, n: scaled(x, n).sum(), (0, 1), allow_int=True)(x, n), lambda: (x, ints)
        ),
        "checkpoint": Case(jax.value_and_grad(lambda x: jax.checkpoint(lambda y: jnp.sin(jnp.sin(y)))(x).sum())),
        "dtypes": Case(
            lambda a, b, c, d: (a.astype(jnp.bfloat16) * 2, b | 1, ~c, d + 1, jnp.where(c, a, 0), a * 1j),
            lambda: (x, ints, jnp.array([True, False, True]), ints.astype(jnp.uint8)),
        ),
        "typed keys": Case(dropout, lambda: (jax.random.key(3), x)),
        "legacy keys": Case(dropout, lambda: (jax.random.PRNGKey(3), x)),
        "donated keys": Case(dropout, lambda: (jax.random.key(3), x), options={"donate_argnums": 0}),
        "closed over": Case(lambda x: x @ table + x @ words),
        "inputs returned": Case(lambda x, y: (x, x, y + 1, x), lambda: (x, x)),
        "donated and returned": Case(
            lambda x, y: (x, y + 1), lambda: (x + 0, x + 0), options={"donate_argnums": (0, 1)}
        ),
        "returned twice": Case(lambda x: (lambda y: (y, {"again": y}))(x + 1)),
        "literals": Case(lambda x: (x + 1, 3.0, None, 2, True, np.float32(4), jnp.bfloat16(2))),
        "nothing but literals": Case(lambda x: (3, None)),
        "nothing done": Case(lambda x: x),
        "no arguments": Case(lambda: jnp.ones(3) * 2, lambda: ()),
        "dropped outputs": Case(lambda x: (jax.lax.top_k(x, 2)[0], jax.lax.sort((x, 2 * x))[1])),
        "no elements": Case(lambda x: (x[:0] + 1, jnp.zeros((0, 3)))),
        "python scalars": Case(
            lambda a, b, c, x: (a, b + 1, c, a * b, x * a, x.astype(jnp.bfloat16) * a), lambda: (1.0, 2, True, x)
        ),
        "weak arrays": Case(lambda a: (a, a * 2, jnp.bfloat16(1) * a), lambda: (jnp.asarray(2.0),)),
        "numpy arguments": Case(lambda a, b: (a, a * 2, b + 1), lambda: (np.ones(3), np.float64(3))),
        "keyword arguments": Case(lambda a, *, b: a + b, kwargs={"b": x}),
        "scan": Case(lambda x: jax.lax.scan(lambda c, y: (jnp.sin(c) + y, c * y), x[0], x)),
        "while": Case(lambda x: jax.lax.while_loop(lambda c: c.sum() < 100, lambda c: c * 2 + 1, x)),
        "cond": Case(lambda x: jax.lax.cond(x.sum() > 3, lambda y: y * 2, lambda y: y + 1, x)),
        "loop gradient": Case(
            jax.value_and_grad(lambda x: jax.lax.fori_loop(0, 3, lambda i, c: jnp.sin(c) * i, x).sum())
        ),
        "shard_map": Case(mapped),
        "custom calls": Case(lambda x: (jnp.linalg.qr(x), jnp.fft.rfft(x))),
        "pure_callback": Case(lambda x: jax.pure_callback(np.sin, x, x) + 1),
        "references": Case(written_in_place),
    }  # fmt: skip


CASES = cases()
