"""The facts of jax's primitives: one record for each primitive, in the file of its family.

May import `compat`, and the types of `planning`.
"""

from memplan.program.ops import (
    contractions,
    elementwise,
    indexing,
    library_calls,
    random,
    reductions,
    shapes,
    windows,
)
from memplan.program.ops.axes import Axes, Reduction, shape_of
from memplan.program.ops.bands import MOST_TAPS, Band, banded
from memplan.program.ops.cost import (
    flops_of,
    flops_of_jaxpr,
    is_along_rows,
    is_recomputable,
    library_calls_of,
    matrix_dtype,
    matrix_shape,
    traffic_of,
)
from memplan.program.ops.moments import Moments, squares_about_mean
from memplan.program.ops.record import RECORDS, axes_of, extreme, of
from memplan.program.ops.rows import (
    accumulate,
    identity,
    local_params,
    needed,
    padding_value,
    row_before,
    run_cumulative,
    run_rows,
)
