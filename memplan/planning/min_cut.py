"""Minimum cuts: of choices that cost something and bring others along, the cheapest set.

A choice of projects of which some bring others along (Picard, Management Science 22(11), 1976).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

_ENDLESS = 1 << 30  # more ticks than all costs together


def chosen(
    size: int, source: int, sink: int, costs: Sequence[tuple[int, int, float]], bonds: Sequence[tuple[int, int]]
) -> np.ndarray:
    """By node, whether it is on the source's side of a minimum cut.

    Args:
      size: nodes, the source and the sink among them.
      costs: (start, end, seconds): paid where `start` is on the source's side and `end` is not.
      bonds: (start, end): where `start` is on the source's side, `end` is, too.
    """
    bonds = list(dict.fromkeys(bonds))  # equal ones would be added up, to more ticks than an int32 has
    tick = (sum(seconds for *_, seconds in costs) or 1.0) / (_ENDLESS - 1)
    ticks = [*(int(seconds / tick) for *_, seconds in costs), *(_ENDLESS for _ in bonds)]
    starts, ends = zip(*((start, end) for start, end, *_ in (*costs, *bonds)), strict=True)
    network = csr_matrix((np.array(ticks, dtype=np.int32), (starts, ends)), shape=(size, size))
    rest = network - maximum_flow(network, source, sink).flow
    rest.data = np.maximum(rest.data, 0)
    rest.eliminate_zeros()
    found = np.zeros(size, dtype=bool)
    found[breadth_first_order(rest, source, return_predecessors=False)] = True
    return found
