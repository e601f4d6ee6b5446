"""Names of collectives: those that users write, and those that schedules have."""

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
