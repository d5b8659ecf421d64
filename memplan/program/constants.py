"""Arrays that a step captures, and digests of arrays: jax's print of a program shows neither."""

import hashlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from memplan.program import compat


def captured(program: compat.ClosedJaxpr) -> Iterator[tuple[str, Any]]:
    """Yield the type, or `literal`, and the value of each array that a program captures.

    The arrays of its loops and branches are included.
    """
    yield from ((type_of(value), value) for _, value in compat.consts_of(program))
    for eqn in program.jaxpr.eqns:
        for inner in compat.sub_jaxprs(eqn):
            yield from captured(inner) if hasattr(inner, "consts") else ()
        # jax prints the values of scalar literals, so only arrays are captured
        literals = (compat.value_of(atom) for atom in eqn.invars if not compat.is_var(atom))
        yield from (("literal", literal) for literal in literals if np.ndim(literal) > 0)


def digests_of_constants(program: compat.ClosedJaxpr) -> Iterator[str]:
    """Yield the type and digest of each array that a program captures."""
    return (f"{kind} {digest_of(value)}" for kind, value in captured(program))


def type_of(leaf: Any) -> str:
    """The dtype and shape of an array: `float32[8,4]`."""
    dtype = getattr(leaf, "dtype", type(leaf).__name__)
    return f"{dtype}[{','.join(map(str, np.shape(leaf)))}]"


def digest_of(leaf: Any) -> str:
    """The digest of an array's bytes; '-' if this process does not have them all."""
    if isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated):
        return "-"
    array = jax.random.key_data(leaf) if compat.is_key(leaf) else leaf
    elements = np.ascontiguousarray(np.asarray(array)).reshape(-1).view(np.uint8)
    return hashlib.blake2b(elements.data, digest_size=16).hexdigest()
