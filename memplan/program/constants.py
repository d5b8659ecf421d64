"""Digests of arrays, such as those that a step captures: jax's print of a program does not show them."""

import hashlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from memplan.program import compat


def digests_of_constants(program: compat.ClosedJaxpr) -> Iterator[str]:
    """Types and digests of all arrays that a program captures, those of its loops and branches included."""
    yield from (f"{type_of(value)} {digest_of(value)}" for _, value in compat.consts_of(program))
    for eqn in program.jaxpr.eqns:
        for inner in compat.sub_jaxprs(eqn):
            yield from digests_of_constants(inner) if hasattr(inner, "consts") else ()
        literals = (compat.value_of(atom) for atom in eqn.invars if not compat.is_var(atom))
        yield from (f"literal {digest_of(one)}" for one in literals if np.ndim(one) > 0)  # numbers stand in the text


def type_of(leaf: Any) -> str:
    return f"{getattr(leaf, 'dtype', type(leaf).__name__)}[{','.join(map(str, np.shape(leaf)))}]"


def digest_of(leaf: Any) -> str:
    """Of an array's bytes; '-' if this process does not have them all."""
    if isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated):
        return "-"
    plain = jax.random.key_data(leaf) if compat.is_key(leaf) else leaf
    found = np.ascontiguousarray(np.asarray(plain)).reshape(-1).view(np.uint8)
    return hashlib.blake2b(found.data, digest_size=16).hexdigest()
