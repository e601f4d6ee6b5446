"""Names of collectives, for users and for schedules; scopes that show who made an operation."""

COLLECTIVE_OF = {
    "psum": "all_reduce",
    "pmean": "all_reduce",
    "pmax": "all_reduce",
    "pmin": "all_reduce",
    "pprod": "all_reduce",
    "psum_scatter": "reduce_scatter",
    "all_gather": "all_gather",
    "all_to_all": "all_to_all",
    "ppermute": "permute",
    "pbroadcast": "broadcast",
    "preduce": "reduce",
    "pgather": "gather",
    "pscatter": "scatter",
}
"""jax.lax's (and xcoll's) names of collectives, and the schedules' names for the same."""

PLAN_SCOPE = "xcoll_plan"
"""Scope, in the compiled program's names of operations, of all that a plan puts there."""

GRADIENTS_SCOPE = "xcoll_gradients"
"""The same of what `xcoll.gradients` sums by itself."""
