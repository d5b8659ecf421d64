"""The last size that fits, against trying them all."""

import math

from hypothesis import given
from hypothesis import strategies as st

from memplan.studies.largest import last_fitting


@given(count=st.integers(1, 500), fitting=st.integers(0, 500))
def test_it_is_the_last_that_fits_and_both_sides_of_it_were_tried(count: int, fitting: int) -> None:
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size < fitting

    last = last_fitting(count, fits)
    assert last == min(fitting, count) - 1
    assert last < 0 or last in tried
    assert last + 1 == count or last + 1 in tried
    assert len(tried) == len(set(tried)) <= math.ceil(math.log2(count + 1))
