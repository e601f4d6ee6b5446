"""Gradients summed over ranks, as an optax transformation: in buckets, exactly or compressed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh

from xcoll import collectives
from xcoll.calls import Axes, check_axes
from xcoll.gradients.buckets import fill_buckets, flatten, unflatten
from xcoll.gradients.compressed import SyncState, initial_state, reduce_compressed
from xcoll.gradients.compressor import Compressor
from xcoll.gradients.leaves import Leaf, as_varying, check_varying, leaves_of
from xcoll.gradients.options import Options, axis_names
from xcoll.names import GRADIENTS_SCOPE
from xcoll.policy import Policy


def sync(
    axis_name: Axes,
    *,
    policy: Policy | None = None,
    compressor: Compressor | None = None,
    bucket_bytes: int = 32 * 2**20,
    op: str = "mean",
    compress_axis: Axes | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    seed: int = 0,
) -> optax.GradientTransformation:
    """Averages gradients over ranks, in few collectives; for the start of an `optax.chain`.

    ``update`` is called inside `jax.shard_map`, with each rank's own gradients. Leaves go into
    buckets by dtype in reverse order of the tree (the backward pass makes the last ones first), a
    bucket is one collective, and what comes out has the shapes, dtypes and order that went in. None
    and masked nodes are passed over, empty leaves and ``float0`` stay as they are.

    Without a compressor a bucket is `xcoll.pmean` (or `xcoll.psum`) with ``policy``, which may
    compress too, without state. float16 is summed in float32 for the mean, since its sum can
    overflow where the mean is finite.

    With a compressor, float32, bfloat16 and float16 leaves go through it, in float32; leaves that
    it does not take, and integers, are reduced exactly. Where only a part of ``axis_name`` is
    compressed, the rest is done exactly around it: reduce-scatter, compression of the shard,
    all-gather; a rank then keeps the residual of its shard only. The mean is taken before
    compressing, so that residuals are in units of what is applied. The state holds arrays of which
    every rank has its own: ``(num_ranks, ...)`` outside of `jax.shard_map`, of partition spec
    ``P(axis_name)``; `state_specs` gives the specs of a whole optimizer state.

    Under ``check_vma=True`` the gradient of parameters that are the same on all ranks has been
    summed already, and a leaf whose type says so is an error: differentiate with respect to
    ``jax.lax.pcast(params, axes, to="varying")``. Under ``check_vma=False`` types do not say it,
    nothing is summed by itself, and nothing can be checked. Neither can it be seen there which
    leaves vary over further axes (of tensor parallelism): they share buckets, and a compressed
    bucket of both kinds may differ between ranks of those axes; mask one kind, or check.

    All ranks must come to the collectives: no condition of a rank's own may be around ``update``.
    So `optax.apply_if_finite` belongs behind ``sync``, where all ranks see the same values; around
    it, it is an error under ``check_vma=True``, and ranks wait for each other for ever under False.

    Args:
      axis_name: mesh axis, or a tuple of them, to sum over.
      policy: what xcoll may do with buckets that are not compressed.
      compressor: one of `error_feedback`, `top_k`, `random_k`, `powersgd`, `sign`, or another
        `Compressor`.
      bucket_bytes: size of a bucket; a larger leaf has one of its own.
      op: ``"mean"`` or ``"sum"``.
      compress_axis: the part of ``axis_name`` to compress over, usually the slow one; all for None.
      mesh: where ``init`` outside of `jax.shard_map` takes the number of ranks from, and places
        the state; None takes that of `jax.set_mesh`.
      seed: of random draws and first factors; the same on all processes.

    Returns:
      An `optax.GradientTransformation`. Its ``init`` works inside `jax.shard_map` (one rank's
      state) and outside (all ranks').

    Raises:
      ValueError: an option is out of range; in ``update``, a leaf has been summed already, an
        integer leaf has no mean, or the state is of other gradients or ranks.
      TypeError: an option is of a wrong type, or a leaf cannot be summed.
      UnknownAxisError: in ``update``, an axis is not bound.

    Example:
      >>> import optax
      >>> mesh = jax.sharding.Mesh(jax.devices()[:4], ("data",))
      >>> optimizer = optax.chain(sync("data"), optax.sgd(1.0))
      >>> def step(params, x):
      ...     own = jax.lax.pcast(params, ("data",), to="varying")
      ...     grads = jax.grad(lambda p: jnp.sum(p * x))(own)
      ...     updates, _ = optimizer.update(grads, optimizer.init(params))
      ...     return optax.apply_updates(params, updates)
      >>> train = jax.shard_map(
      ...     step, mesh=mesh, in_specs=(jax.P(), jax.P("data")), out_specs=jax.P()
      ... )
      >>> print(train(jnp.zeros(1), jnp.arange(4.0)))
      [-1.5]
    """
    axes = axis_names("sync(axis_name", axis_name)
    if compress_axis is not None and compressor is None:
        raise ValueError(
            f"sync(compress_axis={compress_axis!r}): there is no compressor; pass compressor=, or"
            " Policy(codec={axis: codec}) for a codec without state"
        )
    wanted = axes if compress_axis is None else axis_names("sync(compress_axis", compress_axis)
    options = Options(
        axes=axes,
        # In the order of axis_name, which numbers the ranks.
        compressed=tuple(sorted(wanted, key=lambda a: axes.index(a) if a in axes else len(axes))),
        policy=policy,
        compressor=compressor,
        bucket_bytes=bucket_bytes,
        op=op,
        mesh=mesh,
        seed=seed,
    )

    def init(params: Any) -> Any:
        return optax.EmptyState() if options.compressor is None else initial_state(options, params)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        return _synchronised(options, updates, state)

    return optax.GradientTransformation(init, update)


@jax.named_scope(GRADIENTS_SCOPE)
def _synchronised(options: Options, updates: Any, state: Any) -> tuple[Any, Any]:
    check_axes("sync", options.axes[0] if len(options.axes) == 1 else options.axes)
    leaves = leaves_of("sync", updates)
    check_varying("sync", leaves, options.axes)
    values, structure = jax.tree.flatten(updates)
    if options.compressor is not None:
        state, done = reduce_compressed(options, leaves, values, state)
    else:
        done = {}
        if isinstance(state, SyncState):
            raise TypeError(
                "sync: the state is of a sync with a compressor, and this one has none; pass the"
                " compressor, or make the state with the same transformation's init, which drops"
                " what was not sent yet"
            )
    rest = [
        position
        for position, leaf in enumerate(leaves)
        if position not in done and not leaf.is_nothing
    ]
    for position in rest:
        _check_mean(options, leaves[position])
    full = [position for position in rest if 0 not in leaves[position].shape]
    for position in set(rest) - set(full):
        leaf = leaves[position]
        empty = jnp.zeros(leaf.shape, leaf.dtype)
        done[position] = as_varying(empty, leaf.varying - set(options.axes))
    for members in fill_buckets(leaves, full, options.axes, options.bucket_bytes):
        summed = _exact(options, [values[m] for m in members])
        done.update(zip(members, summed, strict=True))
    results = [done.get(position, value) for position, value in enumerate(values)]
    return jax.tree.unflatten(structure, results), state


def _exact(options: Options, values: Sequence[Any]) -> list[jax.Array]:
    reduce = collectives.pmean if options.op == "mean" else collectives.psum
    flat = reduce(flatten(values), options.axes, policy=options.policy)
    return unflatten(flat, [jnp.shape(value) for value in values])


def _check_mean(options: Options, leaf: Leaf) -> None:
    if options.op == "mean" and jnp.issubdtype(leaf.dtype, jnp.integer):
        raise ValueError(
            f"sync(op='mean'): {leaf.name} has dtype {leaf.dtype}, and a mean of integers is none;"
            " leave it out with optax.masked, or use op='sum', which is exact"
        )
