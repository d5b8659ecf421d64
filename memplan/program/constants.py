"""Arrays that a step captures, and digests of arrays: jax's print of a program shows neither."""

import hashlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from memplan.program import compat


def captured(program: compat.ClosedJaxpr) -> Iterator[tuple[str, Any]]:
    """Type, or `literal`, and value of each array that a program captures, those of its loops and branches included."""
    yield from ((type_of(value), value) for _, value in compat.consts_of(program))
    for eqn in program.jaxpr.eqns:
        for inner in compat.sub_jaxprs(eqn):
            yield from captured(inner) if hasattr(inner, "consts") else ()
        literals = (compat.value_of(atom) for atom in eqn.invars if not compat.is_var(atom))
        yield from (("literal", one) for one in literals if np.ndim(one) > 0)  # numbers stand in the text


def digests_of_constants(program: compat.ClosedJaxpr) -> Iterator[str]:
    """Types and digests of all arrays that a program captures."""
    return (f"{kind} {digest_of(value)}" for kind, value in captured(program))


def type_of(leaf: Any) -> str:
    return f"{getattr(leaf, 'dtype', type(leaf).__name__)}[{','.join(map(str, np.shape(leaf)))}]"


def digest_of(leaf: Any) -> str:
    """Of an array's bytes; '-' if this process does not have them all."""
    if isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated):
        return "-"
    plain = jax.random.key_data(leaf) if compat.is_key(leaf) else leaf
    found = np.ascontiguousarray(np.asarray(plain)).reshape(-1).view(np.uint8)
    return hashlib.blake2b(found.data, digest_size=16).hexdigest()
