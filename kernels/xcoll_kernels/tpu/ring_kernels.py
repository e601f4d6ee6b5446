"""The ring kernels: phases put together, with their buffers, and the call.

Each function takes a packed payload and returns a packed result (`ring_layout.Tiles.pack`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from xcoll_kernels.tpu import ring_gather, ring_reduce, ring_stream
from xcoll_kernels.tpu.ring_layout import DIRECTIONS, Ring, Tiles
from xcoll_kernels.tpu.ring_wire import Wire

_FIRST_COLLECTIVE_ID = 16

Refs = dict[str, Any]
Shapes = dict[str, tuple[tuple[int, ...], Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """What a kernel is made for.

    Attributes:
      ring: where devices are.
      tiles: how a chunk is cut.
      wire: what tiles are sent as.
      interpret: None to compile for TPU.
      collective_id: of the barrier semaphore; None: one that goes by the axis.
    """

    ring: Ring
    tiles: Tiles
    wire: Wire
    interpret: pltpu.InterpretParams | None
    collective_id: int | None

    def call(
        self,
        name: str,
        kernel: Callable[[Any, Refs, Refs], None],
        payload: jax.Array,
        out_shapes: Shapes,
        scratch: dict[str, Any],
    ) -> dict[str, jax.Array]:
        """Runs a kernel after the barrier; returns its outputs by name.

        Args:
          name: to be seen in profiles, with the wire's suffix.
          kernel: called with refs: the payload's and the outputs' (HBM), and the scratch's.
          payload: its input.
          out_shapes: shapes and dtypes of its outputs.
          scratch: as ``scratch_shapes`` of a kernel.
        """
        # With check_vma=True the type of a kernel's outputs has to be said: its input's, made to
        # vary over the ring. (With check_vma=False no type varies, and pcast does nothing.)
        if self.ring.axis_name not in jax.typeof(payload).manual_axis_type.varying:
            payload = lax.pcast(payload, self.ring.axis_name, to="varying")
        varying = jax.typeof(payload).manual_axis_type
        unsharded = jax.NamedSharding(jax.sharding.get_abstract_mesh(), jax.P())
        alone = self.ring.num_ranks == 1
        default_id = _FIRST_COLLECTIVE_ID + self.ring.mesh_axes.index(self.ring.axis_name)
        given_id = default_id if self.collective_id is None else self.collective_id

        def body(payload_ref: Any, out: Refs, refs: Refs) -> None:
            if not alone:
                self.ring.barrier()
            kernel(payload_ref, out, refs)

        hbm = pl.BlockSpec(memory_space=pltpu.HBM)
        called = pl.pallas_call(
            body,
            out_shape={
                # The type keeps XLA from placing them in VMEM, which a block spec does not.
                key: pltpu.HBM.like(
                    jax.ShapeDtypeStruct(shape, dtype, sharding=unsharded, manual_axis_type=varying)
                )
                for key, (shape, dtype) in out_shapes.items()
            },
            in_specs=[hbm],
            out_specs=dict.fromkeys(out_shapes, hbm),
            scratch_shapes=[scratch],
            compiler_params=pltpu.CompilerParams(collective_id=None if alone else given_id),
            interpret=False if self.interpret is None else self.interpret,
            name=name + self.wire.suffix,
        )
        out: dict[str, jax.Array] = called(pltpu.with_memory_space_constraint(payload, pltpu.HBM))
        return out

    def encoded_shapes(self) -> Shapes:
        """Returns the outputs in HBM that hold all ranks' chunks as they are sent."""
        return {
            f"part{i}": ((self.ring.num_ranks, 2, self.tiles.num_tiles, *shape), dtype)
            for i, (shape, dtype) in enumerate(self.wire.parts(self.tiles.tile_rows))
        }

    def encoded_scratch(self, source: Any, target: Any) -> dict[str, Any]:
        """Returns the scratch of an encoded all-gather from and to these dtypes."""
        return {
            "gather": ring_gather.scratch(len(self.encoded_shapes())),
            "encode": ring_stream.scratch(self.tiles, self.wire, source),
            "decode": ring_stream.scratch(self.tiles, self.wire, target),
        }


def reduce_scatter(setting: Setting, payload: jax.Array) -> jax.Array:
    """Sums ``[num_ranks, 2, ...]``; returns this rank's chunk ``[2, ...]``. Two ranks at least."""

    def kernel(payload: Any, out: Refs, refs: Refs) -> None:
        _reduce(setting, payload, lambda direction: out["mine"].at[direction], refs)

    shapes: Shapes = {"mine": (payload.shape[1:], payload.dtype)}
    scratch = ring_reduce.scratch(setting.tiles, setting.wire, payload.dtype, payload.dtype)
    return setting.call("ring_reduce_scatter", kernel, payload, shapes, {"reduce": scratch})["mine"]


def all_gather(setting: Setting, payload: jax.Array) -> jax.Array:
    """Gathers ``[2, ...]`` of all ranks as they are: ``[num_ranks, 2, ...]``."""

    def kernel(payload: Any, out: Refs, refs: Refs) -> None:
        _gather(setting, [out["gathered"]], [payload], None, refs)

    shape = (setting.ring.num_ranks, *payload.shape)
    shapes: Shapes = {"gathered": (shape, payload.dtype)}
    scratch = {"gather": ring_gather.scratch(1)}
    return setting.call("ring_all_gather", kernel, payload, shapes, scratch)["gathered"]


def encoded_all_gather(setting: Setting, payload: jax.Array) -> jax.Array:
    """Gathers ``[2, ...]`` of all ranks, encoded on the wire: ``[num_ranks, 2, ...]``."""

    def kernel(payload: Any, out: Refs, refs: Refs) -> None:
        _encode_and_gather(setting, payload, out, refs)

    shape = (setting.ring.num_ranks, *payload.shape)
    shapes = setting.encoded_shapes() | {"gathered": (shape, payload.dtype)}
    scratch = setting.encoded_scratch(payload.dtype, payload.dtype)
    return setting.call("ring_all_gather", kernel, payload, shapes, scratch)["gathered"]


def all_reduce(setting: Setting, payload: jax.Array) -> jax.Array:
    """Sums ``[num_ranks, 2, ...]``, all of it on all ranks. Two ranks at least."""

    def kernel(payload: Any, out: Refs, refs: Refs) -> None:
        gathered, rank = out["gathered"], setting.ring.rank
        _reduce(setting, payload, lambda way: gathered.at[rank(way, 0), way], refs)
        _gather(setting, [gathered], None, None, refs)

    shapes: Shapes = {"gathered": (payload.shape, payload.dtype)}
    scratch = {
        "reduce": ring_reduce.scratch(setting.tiles, setting.wire, payload.dtype, payload.dtype),
        "gather": ring_gather.scratch(1),
    }
    return setting.call("ring_all_reduce", kernel, payload, shapes, scratch)["gathered"]


def encoded_all_reduce(setting: Setting, payload: jax.Array) -> jax.Array:
    """As `all_reduce`, encoded on the wire. Between the phases the sum is kept in float32."""

    def kernel(payload: Any, out: Refs, refs: Refs) -> None:
        _reduce(setting, payload, lambda direction: out["mine"].at[direction], refs)
        _encode_and_gather(setting, out["mine"], out, refs)

    shapes = setting.encoded_shapes() | {
        "mine": (payload.shape[1:], jnp.float32),
        "gathered": (payload.shape, payload.dtype),
    }
    scratch = {
        "reduce": ring_reduce.scratch(setting.tiles, setting.wire, payload.dtype, jnp.float32),
        **setting.encoded_scratch(jnp.float32, payload.dtype),
    }
    return setting.call("ring_all_reduce", kernel, payload, shapes, scratch)["gathered"]


def _reduce(setting: Setting, payload: Any, result_of: Callable[[int], Any], refs: Refs) -> None:
    ring_reduce.ReduceScatter(
        ring=setting.ring,
        tiles=setting.tiles,
        wire=setting.wire,
        payload=payload,
        result_of=result_of,
        refs=refs["reduce"],
    ).run()


def _gather(
    setting: Setting,
    gathered: Sequence[Any],
    own: Sequence[Any] | None,
    then: Callable[[int, Any], None] | None,
    refs: Refs,
) -> None:
    ring_gather.AllGather(
        ring=setting.ring, gathered=gathered, own=own, then=then, refs=refs["gather"]
    ).run()


def _encode_and_gather(setting: Setting, mine: Any, out: Refs, refs: Refs) -> None:
    parts = [out[name] for name in setting.encoded_shapes()]
    for direction in DIRECTIONS:
        own = [part.at[setting.ring.rank(direction, 0), direction] for part in parts]
        ring_stream.encode(mine.at[direction], own, setting.wire, refs["encode"])

    def then(direction: int, rank: Any) -> None:
        sources = [part.at[rank, direction] for part in parts]
        target = out["gathered"].at[rank, direction]
        ring_stream.decode(sources, target, setting.wire, refs["decode"])

    _gather(setting, parts, None, then, refs)
