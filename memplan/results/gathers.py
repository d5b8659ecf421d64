"""The warning about gathers that the user does not expect, with the lines of the step and what to try."""

from memplan.compilation.outcome import Outcome
from memplan.units import show_bytes
from memplan.xla.collectives.unexpected import Gather

_LEAST = 0.01  # of the step's bytes: a smaller one, such as of indices, costs little
_MOST_NAMED = 3
_NAMES = {"conv_general_dilated": "a grouped convolution", "dynamic_slice": "a slice", "sort": "a sort"}
_ADVICE = {
    "conv_general_dilated": "jax.shard_map around it: each device then convolves its own rows",
    "dynamic_slice": "x.reshape(batch // k, k, ...).swapaxes(0, 1) if it reads one of k microbatches: each then has "
    "rows of every device",
}
_ALONG = (
    "jax.lax.with_sharding_constraint to divide another dimension, or jax.shard_map if each device may use its own "
    "part alone"
)


def told_gathers(found: Outcome) -> str:
    """The text of the warning; '' without such gathers."""
    gathers = [one for one in found.gathers if one.nbytes >= _LEAST * found.device_bytes]
    if not gathers:
        return ""
    more = f"\n  and {len(gathers) - _MOST_NAMED} more" if len(gathers) > _MOST_NAMED else ""
    return (
        "XLA cannot divide these operations of the step along the dimension that is divided among the devices, and "
        f"sends what they read between all of them:\n  {'\n  '.join(map(_line, gathers[:_MOST_NAMED]))}{more}"
    )


def _line(one: Gather) -> str:
    where = f" ({one.source})" if one.source else ""
    name = _NAMES.get(one.reader, one.reader)
    if one.array is None:
        read = f"each device exchanges {show_bytes(one.nbytes)} with the others"
    else:
        read = (
            f"each device gathers {one.array.in_numpy}, {show_bytes(one.nbytes)}, of which its own piece is "
            f"{show_bytes(one.piece_nbytes)}"
        )
    return f"{name}{where}: {read}. Try {_ADVICE.get(one.reader, _ALONG)}"
