"""What tensor parallelism costs in every layer, and whether it lies on a slow link."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax.numpy as jnp

from xcoll.errors import unknown
from xcoll.hardware.fields import whole
from xcoll.plan import Plan, Request
from xcoll.planner import plan
from xcoll.policy import Policy
from xcoll.sharding.problems import Problems
from xcoll.topology import Level, Topology
from xcoll.units import readable_bytes, readable_rate, readable_time

BLOCKS = ("heads", "mlp")
"""Logical names that a block of a layer sums over: attention over heads, the MLP over ``mlp``."""

_CALL = "Rules.check"
_SLOW_KINDS = ("dcn", "network")
_SLOW_RATIO = 4


@dataclass(frozen=True, kw_only=True)
class TensorCost:
    """What the all-reduces of one layer's activations are predicted to cost.

    Attributes:
      axes: the mesh axes they go over.
      num_reductions: all-reduces in one layer, forward and backward.
      shape: of the activations that each sums, per rank.
      dtype: their dtype.
      plan: how each one is planned.
      slow_links: the slow links they cross, in words; empty where there is none.
    """

    axes: tuple[str, ...]
    num_reductions: int
    shape: tuple[int, ...]
    dtype: str
    plan: Plan
    slow_links: tuple[str, ...]

    @property
    def time_ps(self) -> int:
        """Predicted picoseconds in one layer, forward and backward."""
        return self.num_reductions * (self.plan.predicted_time_ps or 0)

    def __str__(self) -> str:
        shape = ",".join(map(str, self.shape))
        return (
            f"{self.num_reductions} all-reduces of {self.dtype}[{shape}]"
            f" ({readable_bytes(self.plan.request.num_bytes)}) over {_named(self.axes)}:"
            f" {readable_time(self.time_ps)} per layer by {self.plan.name}"
        )


def check_tensor_axes(
    rules: Mapping[str, tuple[str, ...]],
    topology: Topology,
    *,
    batch: int | None,
    sequence: int,
    embed: int,
    dtype: str,
    tensor_axes: tuple[str, ...] | None,
    force: bool,
) -> tuple[TensorCost, ...]:
    """Prices tensor parallelism, and refuses slow links; see `xcoll.sharding.Rules.check`."""
    if not isinstance(topology, Topology):
        raise TypeError(f"{_CALL}({topology!r}): must be an xcoll.Topology")
    if not isinstance(force, bool):
        raise TypeError(f"{_CALL}(force={force!r}): must be True or False")
    try:
        dtype = str(jnp.dtype(dtype))
    except TypeError as err:
        raise TypeError(f"{_CALL}(dtype={dtype!r}): must be a dtype, such as 'bfloat16'") from err
    sizes = topology.axis_sizes
    _check_axes(rules, tensor_axes or (), topology)
    groups = _groups(rules, tensor_axes)
    groups = {axes: count for axes, count in groups.items() if _ranks(axes, sizes) > 1}
    shape = _activations(rules, sizes, batch, sequence, embed)
    if not groups:
        return ()
    if not topology.is_known:
        raise ValueError(
            f"{_CALL}: nothing can be said of {_named(next(iter(groups)))}: the topology is unknown"
            f" ({topology.why_unknown}); give one that is known, such as"
            " Topology.parse('v5p:4x4x4', axes=dict(mesh.shape))"
        )
    costs = tuple(_cost(axes, count, shape, dtype, topology) for axes, count in groups.items())
    if not force:
        problems = Problems(_CALL)
        for cost in costs:
            if cost.slow_links:
                problems.add(_refusal(cost))
        problems.raise_any()
    return costs


def _refusal(cost: TensorCost) -> str:
    links = " and ".join(cost.slow_links)
    crosses = "crosses" if len(cost.axes) == 1 else "cross"
    return (
        f"the tensor-parallel {_named(cost.axes)} {crosses} a slow link ({links}): {cost}, which no"
        " compute hides. Lay it on fast links (the mesh's last axis lies innermost), make it"
        " smaller, split parameters over the slow link by fsdp or not at all; or pay with"
        " force=True"
    )


def _check_axes(
    rules: Mapping[str, tuple[str, ...]], tensor_axes: Sequence[str], topology: Topology
) -> None:
    problems = Problems(_CALL)
    sizes = topology.axis_sizes
    for name, axes in rules.items():
        for axis in axes:
            if axis not in sizes:
                problems.add(unknown(f"topology {topology.name!r}", "mesh axis", axis, sizes), name)
    for axis in tensor_axes:
        if axis not in sizes:
            problems.add(
                unknown(f"topology {topology.name!r}", "mesh axis", axis, sizes), "tensor_axes"
            )
    problems.raise_any()


def _groups(
    rules: Mapping[str, tuple[str, ...]], tensor_axes: tuple[str, ...] | None
) -> dict[tuple[str, ...], int]:
    """Returns the axes that are summed over, and how often in one layer.

    A block has one all-reduce forward, after its second matrix, and one backward, before its first.
    """
    if tensor_axes is not None:
        return {tensor_axes: 2 * len(BLOCKS)} if tensor_axes else {}
    if not any(name in rules for name in BLOCKS):
        raise ValueError(
            f"{_CALL}: these rules name neither 'heads' nor 'mlp', so it is not known which mesh"
            " axes are tensor-parallel; say tensor_axes=('model',), or tensor_axes=() for none"
        )
    groups: dict[tuple[str, ...], int] = {}
    for name in BLOCKS:
        # Over an axis of the batch too, as FSDP may have it, parameters are gathered, and no
        # activation is summed.
        axes = tuple(a for a in rules.get(name, ()) if a not in rules.get("batch", ()))
        if axes:
            groups[axes] = groups.get(axes, 0) + 2
    return groups


def _activations(
    rules: Mapping[str, tuple[str, ...]],
    sizes: Mapping[str, int],
    batch: int | None,
    sequence: int,
    embed: int,
) -> tuple[int, int, int]:
    """Returns the shape of one rank's activations, as a block's all-reduce has them."""
    over_batch = _ranks(rules.get("batch", ()), sizes)
    over_sequence = _ranks(rules.get("inner_sequence", ()), sizes)
    batch = over_batch if batch is None else whole(_CALL, "batch", batch, 1)
    sequence = whole(_CALL, "sequence", sequence, 1)
    for name, number, ranks in (
        ("batch", batch, over_batch),
        ("sequence", sequence, over_sequence),
        # Between blocks it may be split where inside them it is not.
        ("sequence", sequence, _ranks(rules.get("sequence", ()), sizes)),
    ):
        if number % ranks:
            raise ValueError(
                f"{_CALL}({name}={number}): must divide by the {ranks} ranks it is split over, such"
                f" as {-(-number // ranks) * ranks}"
            )
    return batch // over_batch, sequence // over_sequence, whole(_CALL, "embed", embed, 1)


def _cost(
    axes: tuple[str, ...], count: int, shape: tuple[int, ...], dtype: str, topology: Topology
) -> TensorCost:
    sizes = tuple(topology.axis_sizes[axis] for axis in axes)
    request = Request(
        "all_reduce",
        "sum",
        axes,
        sizes,
        dtype,
        jnp.dtype(dtype).itemsize,
        (shape,),
        topology.platform,
    )
    return TensorCost(
        axes=axes,
        num_reductions=count,
        shape=shape,
        dtype=dtype,
        plan=plan(request, topology, Policy()),
        slow_links=_slow_links(axes, topology),
    )


def _slow_links(axes: Sequence[str], topology: Topology) -> tuple[str, ...]:
    """Returns the slow links below these axes.

    Slow are networks between hosts and between slices, and any other switch that gives a device
    less than a quarter of what the topology's fastest wire does. A torus never is: it is what
    tensor parallelism on TPU is made for.
    """
    wires = [
        level
        for axis in topology.axes
        for level in axis.levels
        if level.size > 1 and level.link.network != "memory"
    ]
    fastest = max(map(_rate, wires), default=0)
    return tuple(
        f"{level.link.kind} of {level.size}, {readable_rate(_rate(level))} for each device"
        for axis in topology.axes
        if axis.name in axes
        for level in axis.levels
        if level.size > 1
        and level.link.network == "switch"
        and (level.link.kind in _SLOW_KINDS or _rate(level) * _SLOW_RATIO < fastest)
    )


def _rate(level: Level) -> int:
    return level.bandwidth_bytes_per_s // level.shared_by


def _ranks(axes: Sequence[str], sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[axis] for axis in axes)


def _named(axes: Sequence[str]) -> str:
    word = "axis" if len(axes) == 1 else "axes"
    return f"{word} {', '.join(map(repr, axes))}"
