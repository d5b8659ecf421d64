"""The only door to jax._src and jax.extend. Each switch names the release that needs it: 0.11.2 to 0.12 work.

May import nothing of memplan.
"""

from memplan.program.compat.compiler import (
    coordination_client,
    is_coordination_client,
    mark_on_host,
    module_name_of,
    module_proto,
    module_text,
    register_after_scheduling,
    rename_module,
    without_compilation_cache,
)
from memplan.program.compat.jaxprs import (
    ClosedJaxpr,
    DropVar,
    JaxprEqn,
    Literal,
    Scan,
    Var,
    as_struct,
    aval_of,
    bind,
    body_of,
    call_body,
    consts_of,
    control_bodies,
    dce,
    discharge_references,
    input_names,
    is_installed,
    is_on_host,
    is_reference,
    is_var,
    jaxpr_as_fun,
    nbytes_of,
    needs_barrier,
    read,
    relative,
    scan_of,
    source_of,
    sub_jaxprs,
    user_context,
    value_of,
    with_eqns,
)
from memplan.program.compat.primitives import new_primitive
from memplan.program.compat.tracing import (
    BLOCKING_MODULES,
    checkpointed_gradients,
    donated_inputs,
    draws_by_itself,
    empty_on_host,
    has_args_info,
    is_key,
    is_tracing,
    key_impl_of,
    placement_of,
    random_bits_between,
    transform_of,
)
