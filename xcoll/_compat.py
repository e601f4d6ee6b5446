"""Every departure from JAX's public interface, and the only file that imports ``jax._src``.

Each function says what it stands for, so that it can be replaced once a public form exists.
"""

from __future__ import annotations

from typing import Any


def compile_only_gpu_devices(target_config: str, topology: str) -> list[Any]:
    """Makes GPU devices that can only be compiled for.

    The public `jax.experimental.topologies.get_topology_desc` passes no target configuration on
    in a way the CUDA plug-in accepts.

    Args:
      target_config: XLA's text proto ``GpuTargetConfigProto``.
      topology: ``"slices x hosts x devices"``, for example ``"1x2x8"``.
    """
    from jax._src import xla_bridge

    description = xla_bridge.make_pjrt_topology(
        "cuda", "", target_config=target_config, topology=topology
    )
    return list(description._make_compile_only_devices())


def key_value_client() -> Any | None:
    """Returns the key-value store of `jax.distributed`, or None before it is initialised.

    There is no public access to the store.
    """
    from jax._src import distributed

    return distributed.global_state.client
