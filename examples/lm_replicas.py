"""Whether all devices of all processes hold the same bits of what is replicated."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from lm_processes import Processes

Tree = Any


def digests(tree: Tree) -> list[str]:
    """Returns, for each device of this process, a hash of its copy of what is replicated.

    Arrays of which every device has a part of its own, such as residuals, are left out.
    """
    found = {device.id: hashlib.sha256() for device in jax.local_devices()}
    for path, leaf in jax.tree.leaves_with_path(tree):
        if not leaf.sharding.is_fully_replicated:
            continue
        for shard in leaf.addressable_shards:
            digest = found[shard.device.id]
            digest.update(f"{jax.tree_util.keystr(path)} {leaf.dtype} {leaf.shape}".encode())
            digest.update(np.ascontiguousarray(shard.data).tobytes())
    return [digest.hexdigest()[:16] for digest in found.values()]


def check_alike(what: str, by_process: Sequence[Sequence[str]]) -> str:
    """Returns the hash that all devices have.

    Args:
      what: which state it is, for the message.
      by_process: for each process what `digests` returned there.

    Raises:
      RuntimeError: they differ; the message names the devices.
    """
    holders: dict[str, list[str]] = {}
    for process, found in enumerate(by_process):
        for device, digest in enumerate(found):
            holders.setdefault(digest, []).append(f"{process}.{device}")
    if len(holders) > 1:
        shown = "; ".join(f"{digest} on {', '.join(held)}" for digest, held in holders.items())
        raise RuntimeError(
            f"{what}: replicas differ, so that devices train different models. Hashes by"
            f" process.device: {shown}"
        )
    return next(iter(holders))


def check_replicas(what: str, tree: Tree, processes: Processes) -> str:
    """Compares all devices of all processes; returns the hash. All processes have to call it.

    Raises:
      RuntimeError: they differ; on every process.
    """
    return check_alike(what, processes.gather(digests(tree)))
