"""What the script finds in its environment on each host."""

from __future__ import annotations

import os
from collections.abc import Mapping

PORT = 8476
"""The coordinator's port where every port is free."""

# What another launcher around this one says of itself, which jax would believe first.
_OTHERS = ("SLURM_", "OMPI_", "PMIX_", "PMI_", "JAX_COORDINATOR_", "JAX_LOCAL_DEVICE_IDS")


def environment(
    base: Mapping[str, str], *, host: int, num_hosts: int, num_devices: int, coordinator: str
) -> dict[str, str]:
    """Returns the environment of a host's script.

    `jax.distributed.initialize()` reads the coordinator's address from the variable of jax, and
    from a cluster's manager alone how many processes there are and which this one is. So these are
    the variables of Slurm, the manager that jax knows with the fewest assumptions.

    Args:
      base: the launcher's own environment. Proxies are left out: jax warns of them, and there is
        nothing to reach through them.
      host: the index of the host.
      num_hosts: hosts, with one process each.
      num_devices: virtual CPU devices of each host.
      coordinator: address and port of the first host.
    """
    kept = {
        name: value
        for name, value in base.items()
        if not name.startswith(_OTHERS) and not name.lower().endswith("_proxy")
    }
    return kept | {
        # What was printed before a host was killed is in its log.
        "PYTHONUNBUFFERED": "1",
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(num_devices),
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "JAX_COORDINATOR_ADDRESS": coordinator,
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_NODELIST": ",".join(f"host{i}" for i in range(num_hosts)),
        "SLURM_NTASKS": str(num_hosts),
        "SLURM_PROCID": str(host),
        "SLURM_LOCALID": "0",
    }
