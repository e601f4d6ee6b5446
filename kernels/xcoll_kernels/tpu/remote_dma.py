"""Ring collectives for TPU in which one kernel sends and reduces, over remote DMA.

**What runs.** A rank's payload is cut into a chunk for each rank, a chunk into two halves, a half
into tiles. One half of every chunk travels the ring upwards and the other downwards at the same
time, so that both directions of every link are used.

- *Reduce-scatter* (`ring_reduce`): a tile of chunk ``c`` starts at the neighbour of rank ``c`` and
  ends at ``c`` after ``num_ranks - 1`` hops. Each rank on the way receives it in VMEM, adds its own
  tile, which was loaded from HBM meanwhile, and sends the sum on. Up to four tiles of each
  direction are on their way at once, so that one is added while others move. Whatever the payload,
  a kernel holds some MiB of VMEM.
- *All-gather* (`ring_gather`): half chunks go from HBM to HBM, passed on unchanged.
- *All-reduce*: the two, one after the other, in one kernel.

**The encoded form.** The wire carries int8 codes and a power-of-two scale for each `BLOCK` = 256
contiguous elements (`xcoll_kernels.arithmetic`): 257 bytes where float32 takes 1024, plus padding.
A reduce-scatter decodes, adds in float32 and encodes at each hop, ``num_ranks - 1`` roundings in
all; its result is not encoded. An all-gather encodes once and passes codes on as they are. A rank
decodes its own chunk from the codes too, so all ranks hold the same bits.

**Why it is free of races.**

1. *Entry.* A device first waits for both neighbours (barrier semaphore), so nothing is sent into a
   buffer that does not exist yet. Barrier semaphores go by ``collective_id``, which differs by mesh
   axis. On one axis a device can finish a kernel only with data of both neighbours, that is after
   both have passed the barrier; so signals of two kernels are never mixed up.
2. *Slots.* Tile number ``i`` of a direction goes through slot ``i mod slots``, with a DMA semaphore
   for each slot, on both sides. A sender overwrites a send slot after the copy out of it has ended.
   It sends into a receive slot again only once the receiver has said that its contents were read
   (a counting semaphore). Receivers read in order, so ``i - slots + 1`` signals mean that slot
   ``i mod slots`` is free, and at most one copy is under way on a semaphore at any time.
3. *Places.* In the all-gather each half chunk has its own place in HBM, written once. Two
   semaphores alternate: the copy of step ``s + 2`` starts after the receiver has waited for that
   of step ``s``.
4. *Exit.* Every copy and every signal that a device is sent is waited for before it leaves, so all
   semaphores end at zero and nobody writes to a device that has gone on.

It cannot wait for ever either. All devices run the same list of iterations. In iteration ``k`` a
device waits for a tile that was sent in an earlier one, and for a slot that the neighbour frees in
the first half of iteration ``k`` at the latest, since there are more slots than tiles in flight.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from xcoll_kernels.tpu import ring_kernels
from xcoll_kernels.tpu.ring_layout import MAX_TILE_ROWS, ROW_UNIT, Ring, tiles_of
from xcoll_kernels.tpu.ring_wire import Int8Wire, PlainWire, Wire

_PLAIN_TILE_ROWS = 256
_ENCODED_TILE_ROWS = 512

_LIMITS = {
    # dtype: the largest float32 that rounds to a finite value of it, and its largest value.
    "float32": (float.fromhex("0x1.fffffep127"), float.fromhex("0x1.fffffep127")),
    "bfloat16": (float.fromhex("0x1.fefffep127"), float.fromhex("0x1.fep127")),
}


def ring_all_reduce(
    x: jax.Array,
    axis_name: str,
    *,
    encoded: bool = False,
    interpret: pltpu.InterpretParams | None = None,
    tile_rows: int | None = None,
    collective_id: int | None = None,
) -> jax.Array:
    """Sums over a mesh axis, as `jax.lax.psum`, in one kernel.

    With ``c`` the chunk of an element (of ``num_ranks`` equal ones of the flat, padded payload) the
    sum is ``((x[c+1] + x[c+2]) + ...) + x[c]`` in the first half of the chunk's rows, and
    ``((x[c-1] + x[c-2]) + ...) + x[c]`` in the second, ranks modulo ``num_ranks``. All ranks hold
    the same bits. The sum is added in float32. What travels is in x's dtype: a bfloat16 sum is
    rounded to nearest even at each hop.

    Encoded, each partial sum is encoded to int8 for its hop, and the sum once more for the way
    back: ``num_ranks`` encodings, each with an error of at most 1/127 of its block's largest
    magnitude (plus 2**-126). A block with a value that is not finite is NaN.

    Args:
      x: per shard, any shape, float32 or bfloat16. Call it inside `jax.shard_map`.
      axis_name: one mesh axis, of any size.
      encoded: whether the wire carries int8.
      interpret: to run on CPU, under ``check_vma=False``; None compiles for TPU.
      tile_rows: rows of 256 elements in a tile at most, a multiple of 32 up to 512. None: 256, and
        512 if encoded, which fit the VMEM of v5e, v5p and v6e.
      collective_id: of the barrier semaphore; None: 16 + the index of the axis in the mesh. Kernels
        over other axes or of other packages must use others.

    Returns:
      The sum, with x's shape and dtype. Its type varies over the axis although its value does not.

    Raises:
      ValueError: ``axis_name`` is not a manual axis here, ``tile_rows`` is not such a number.
      NotImplementedError: x has another dtype, or ``axis_name`` is more than one axis.

    Example:
      >>> from functools import partial
      >>> mesh = jax.sharding.Mesh(jax.devices()[:2], ("x",))
      >>> fn = partial(ring_all_reduce, axis_name="x", interpret=pltpu.InterpretParams())
      >>> spec = jax.P("x")
      >>> sharded = jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
      >>> jax.jit(sharded)(jnp.arange(4.0)).tolist()
      [2.0, 4.0, 2.0, 4.0]
    """
    call = f"ring_all_reduce(axis_name={axis_name!r})"
    ring = _ring(call, axis_name)
    num_ranks = ring.num_ranks
    elements = -(-x.size // num_ranks)
    setting = _setting(call, ring, x, elements, encoded, interpret, tile_rows, collective_id)
    if x.size == 0 or (num_ranks == 1 and not encoded):
        return x
    padded = jnp.pad(x.reshape(-1), (0, elements * num_ranks - x.size))
    payload = setting.tiles.pack(padded.reshape(num_ranks, elements))
    if num_ranks == 1:
        summed = ring_kernels.encoded_all_gather(setting, payload[0])
    elif encoded:
        summed = ring_kernels.encoded_all_reduce(setting, payload)
    else:
        summed = ring_kernels.all_reduce(setting, payload)
    return setting.tiles.unpack(summed).reshape(-1)[: x.size].reshape(x.shape)


def ring_reduce_scatter(
    x: jax.Array,
    axis_name: str,
    *,
    encoded: bool = False,
    interpret: pltpu.InterpretParams | None = None,
    tile_rows: int | None = None,
    collective_id: int | None = None,
) -> jax.Array:
    """Sums over a mesh axis and keeps this rank's part, as `jax.lax.psum_scatter(tiled=True)`.

    Chunk ``c`` is the ``c``-th of ``num_ranks`` equal parts of x's leading dimension. Order of
    summation, accumulation in float32 and encoding as `ring_all_reduce`; the result itself is never
    encoded, so ``num_ranks - 1`` roundings are made.

    Args:
      x: per shard, ``[num_ranks * m, ...]``, float32 or bfloat16.
      axis_name: as `ring_all_reduce`.
      encoded: as `ring_all_reduce`.
      interpret: as `ring_all_reduce`.
      tile_rows: as `ring_all_reduce`.
      collective_id: as `ring_all_reduce`.

    Returns:
      ``[m, ...]`` of x's dtype.

    Raises:
      ValueError: as `ring_all_reduce`, or the leading dimension is not a multiple of the axis size.
      NotImplementedError: as `ring_all_reduce`.
    """
    call = f"ring_reduce_scatter(axis_name={axis_name!r})"
    ring = _ring(call, axis_name)
    num_ranks = ring.num_ranks
    if x.ndim == 0 or x.shape[0] % num_ranks:
        raise ValueError(
            f"{call}: x has shape {x.shape}; its leading dimension must be a multiple of the"
            f" {num_ranks} ranks: pad it"
        )
    elements, shape = x.size // num_ranks, (x.shape[0] // num_ranks, *x.shape[1:])
    setting = _setting(call, ring, x, elements, encoded, interpret, tile_rows, collective_id)
    if x.size == 0 or num_ranks == 1:
        return x.reshape(shape)
    payload = setting.tiles.pack(x.reshape(num_ranks, elements))
    mine = ring_kernels.reduce_scatter(setting, payload)
    return setting.tiles.unpack(mine[None]).reshape(shape)


def ring_all_gather(
    x: jax.Array,
    axis_name: str,
    *,
    encoded: bool = False,
    interpret: pltpu.InterpretParams | None = None,
    tile_rows: int | None = None,
    collective_id: int | None = None,
) -> jax.Array:
    """Gathers over a mesh axis, as `jax.lax.all_gather(tiled=True)` along the leading dimension.

    Encoded, each rank's payload is encoded to int8 once and decoded by every rank, by its owner
    too: all ranks hold the same bits, one rounding away from the input.

    Args:
      x: per shard, ``[m, ...]``, float32 or bfloat16.
      axis_name: as `ring_all_reduce`.
      encoded: as `ring_all_reduce`.
      interpret: as `ring_all_reduce`.
      tile_rows: as `ring_all_reduce`.
      collective_id: as `ring_all_reduce`.

    Returns:
      ``[num_ranks * m, ...]`` of x's dtype, the same on all ranks.

    Raises:
      ValueError: as `ring_all_reduce`, or x is a scalar.
      NotImplementedError: as `ring_all_reduce`.
    """
    call = f"ring_all_gather(axis_name={axis_name!r})"
    ring = _ring(call, axis_name)
    num_ranks = ring.num_ranks
    if x.ndim == 0:
        raise ValueError(f"{call}: x is a scalar; a dimension to gather along is needed: x[None]")
    shape = (num_ranks * x.shape[0], *x.shape[1:])
    setting = _setting(call, ring, x, x.size, encoded, interpret, tile_rows, collective_id)
    if x.size == 0 or (num_ranks == 1 and not encoded):
        return x.reshape(shape)
    kernel = ring_kernels.encoded_all_gather if encoded else ring_kernels.all_gather
    gathered = kernel(setting, setting.tiles.pack(x.reshape(1, -1))[0])
    return setting.tiles.unpack(gathered).reshape(shape)


def _ring(call: str, axis_name: str) -> Ring:
    if not isinstance(axis_name, str):
        raise NotImplementedError(f"{call}: one mesh axis is taken, not {axis_name!r}")
    mesh = jax.sharding.get_abstract_mesh()
    try:
        num_ranks = lax.axis_size(axis_name)
    except NameError as error:
        raise ValueError(
            f"{call}: no such mesh axis here; manual axes: {mesh.manual_axes}; call it inside"
            f" jax.shard_map over the axis"
        ) from error
    return Ring(axis_name=axis_name, num_ranks=num_ranks, mesh_axes=tuple(mesh.axis_names))


def _setting(
    call: str,
    ring: Ring,
    x: jax.Array,
    elements: int,
    encoded: bool,
    interpret: pltpu.InterpretParams | None,
    tile_rows: int | None,
    collective_id: int | None,
) -> ring_kernels.Setting:
    """Checks x's dtype and ``tile_rows``; ``elements`` is a chunk's size."""
    if x.dtype.name not in _LIMITS:
        raise NotImplementedError(
            f"{call}: x is {x.dtype.name}; these kernels take {' and '.join(_LIMITS)}"
        )
    if tile_rows is None:
        tile_rows = _ENCODED_TILE_ROWS if encoded else _PLAIN_TILE_ROWS
    elif tile_rows % ROW_UNIT or not ROW_UNIT <= tile_rows <= MAX_TILE_ROWS:
        raise ValueError(
            f"{call}: tile_rows={tile_rows!r}; it must be a multiple of {ROW_UNIT} from {ROW_UNIT}"
            f" to {MAX_TILE_ROWS}"
        )
    limit, saturate = _LIMITS[x.dtype.name]
    wire: Wire = Int8Wire(limit=limit, saturate=saturate) if encoded else PlainWire(dtype=x.dtype)
    return ring_kernels.Setting(
        ring=ring,
        tiles=tiles_of(max(1, elements), tile_rows),
        wire=wire,
        interpret=interpret,
        collective_id=collective_id,
    )
