"""The warning about gathers that the user does not expect, with source lines and advice."""

from memplan.compilation.outcome import Outcome
from memplan.units import show_bytes
from memplan.xla.collectives.unexpected import Gather

_MIN_SHARE = 0.01  # of the step's bytes; smaller gathers, as of indices, cost little
_MAX_NAMED = 3
_NAMES = {
    "conv_general_dilated": "a grouped convolution",
    "dynamic_slice": "a slice",
    "sort": "a sort",
}
_ADVICE = {
    "conv_general_dilated": "jax.shard_map around it: each device then convolves its own rows",
    "dynamic_slice": "x.reshape(batch // k, k, ...).swapaxes(0, 1) if it reads one of k "
    "microbatches: each then has rows of every device",
}
_ALONG = (
    "jax.lax.with_sharding_constraint to divide another dimension, or jax.shard_map if each device "
    "may use its own part alone"
)


def gather_warning(outcome: Outcome) -> str:
    """The text of the warning; '' without unexpected gathers."""
    gathers = [
        gather for gather in outcome.gathers if gather.nbytes >= _MIN_SHARE * outcome.device_bytes
    ]
    if not gathers:
        return ""
    lines = "\n  ".join(map(_line, gathers[:_MAX_NAMED]))
    remainder = f"\n  and {len(gathers) - _MAX_NAMED} more" if len(gathers) > _MAX_NAMED else ""
    return (
        "XLA cannot divide these operations of the step along the dimension that is divided among "
        f"the devices, and sends what they read between all of them:\n  {lines}{remainder}"
    )


def _line(gather: Gather) -> str:
    source = f" ({gather.source})" if gather.source else ""
    name = _NAMES.get(gather.reader, gather.reader)
    if gather.array is None:
        read = f"each device exchanges {show_bytes(gather.nbytes)} with the others"
    else:
        read = (
            f"each device gathers {gather.array.in_numpy}, {show_bytes(gather.nbytes)}, of which "
            f"its own piece is {show_bytes(gather.piece_nbytes)}"
        )
    return f"{name}{source}: {read}. Try {_ADVICE.get(gather.reader, _ALONG)}"
