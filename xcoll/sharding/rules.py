"""Rules: what each logical name of a dimension is split over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from xcoll.hardware.fields import word
from xcoll.sharding.mapped import Axes, as_tuple, check_names, mapped, normalised
from xcoll.sharding.placing import place
from xcoll.sharding.problems import Problems
from xcoll.sharding.tensor_costs import TensorCost, check_tensor_axes
from xcoll.topology import Topology


@dataclass(frozen=True)
class Rules:
    """What each logical name of a dimension is split over.

    Attributes:
      axes: logical names, and for each None, a mesh axis, or a tuple of mesh axes (the first
        outermost). Give a mapping, or pairs.

    Raises:
      TypeError: they are something else.
      ValueError: a name is empty or there twice; a mesh axis is there twice for one name.

    Example:
      >>> rules = Rules({"batch": ("dcn", "data"), "embed": None, "mlp": "model"})
      >>> rules.spec(("batch", "embed"))
      P(('dcn', 'data'), None)
      >>> rules.extend({"embed": "data"}).spec(("embed", "mlp"))
      P('data', 'model')
    """

    axes: tuple[tuple[str, Axes], ...]

    def __init__(self, axes: Mapping[str, Axes] | tuple[tuple[str, Axes], ...]) -> None:
        object.__setattr__(self, "axes", tuple(_pairs(axes).items()))

    @property
    def names(self) -> tuple[str, ...]:
        """The logical names."""
        return tuple(name for name, _ in self.axes)

    def extend(self, axes: Mapping[str, Axes]) -> Rules:
        """Returns rules with these names changed, or added.

        Raises:
          TypeError, ValueError: as of `Rules`.
        """
        return Rules({**dict(self.axes), **_pairs(axes)})

    def spec(self, names: Any) -> PartitionSpec:
        """Returns how an array is split whose dimensions are called so.

        Args:
          names: a logical name for each dimension, or None for one that is not split.

        Returns:
          As many entries as there are names.

        Raises:
          TypeError: it is no tuple of names.
          ValueError: a name is unknown, or two of them use the same mesh axis.
          ExceptionGroup: several such errors.
        """
        names = check_names("Rules.spec", names)
        entries, wrong = mapped(dict(self.axes), names)
        problems = Problems("Rules.spec")
        for problem in wrong:
            problems.add(problem)
        problems.raise_any()
        return PartitionSpec(*entries)

    def shardings(self, params: Any, mesh: Mesh | AbstractMesh, *, names: Any = None) -> Any:
        """Returns the sharding of every parameter, for ``in_shardings`` and the like of `jax.jit`.

        A parameter says by annotation what its dimensions are called: a Flax NNX variable by
        ``nnx.with_partitioning`` (or ``out_sharding=``), a Linen one by
        ``nn.with_logical_partitioning``. One without is kept whole on every device, as are
        dimensions beyond its last name. States of optimizers inherit the annotations.

        To make abstract NNX variables under logical names, switch off their placement at creation:
        ``with nnx.use_eager_sharding(False): abstract = nnx.eval_shape(make)``.

        Args:
          params: a tree of arrays or their shapes: an NNX module or state, variables of Linen, or
            any other.
          mesh: the mesh they are placed on.
          names: instead of annotations, a tree of the same structure with a tuple of logical names
            (or a PartitionSpec of them, as ``nnx.get_partition_spec`` and
            ``nn.get_partition_spec`` give) in place of each parameter.

        Returns:
          A tree with a `jax.sharding.NamedSharding` in place of each array; boxes of Linen are
          replaced whole, as ``nn.logical_to_mesh_sharding`` does, variables of NNX hold it, as
          ``nnx.get_named_sharding`` does.

        Raises:
          TypeError: a leaf is no array, names are no tuple of names, ``mesh`` is no mesh.
          ValueError: with the parameter's path: a dimension does not divide, two dimensions use the
            same mesh axis, a logical name is unknown, a mesh axis does not exist, or there are more
            names than dimensions.
          ExceptionGroup: several such errors.

        Example:
          >>> import jax
          >>> rules = Rules({"embed": None, "mlp": "model"})
          >>> params = {"w": jax.ShapeDtypeStruct((16, 32), "float32")}
          >>> mesh = jax.sharding.AbstractMesh((8,), ("model",))
          >>> rules.shardings(params, mesh, names={"w": ("embed", "mlp")})["w"].spec
          P(None, 'model')
          >>> rules.shardings(params, mesh, names={"w": ("mlp", "imbed")})
          Traceback (most recent call last):
          ...
          ValueError: Rules.shardings: ['w']: dimension 'imbed': unknown logical name 'imbed'; ...
        """
        return place(dict(self.axes), params, mesh, names)

    def for_flax(self) -> tuple[tuple[str, Axes], ...]:
        """Returns the rules as Flax takes them: pairs.

        For ``nn.logical_axis_rules``, ``nn.logical_to_mesh_sharding`` and
        ``flax.core.spmd.logical_axis_rules`` (NNX). Where xcoll raises, Linen leaves a dimension
        whole: one whose name is unknown, and the later one of two that use the same mesh axis.
        """
        return self.axes

    def check(
        self,
        topology: Topology,
        *,
        batch: int | None = None,
        sequence: int = 2048,
        embed: int = 4096,
        dtype: str = "bfloat16",
        tensor_axes: str | tuple[str, ...] | None = None,
        force: bool = False,
    ) -> tuple[TensorCost, ...]:
        """Refuses tensor parallelism over a slow link, and prices it.

        Attention sums activations over the mesh axes of ``heads``, the MLP over those of ``mlp``:
        each once forward and once backward in a layer, and the next matrix waits for it. (Sequence
        parallelism sends the same bytes, by reduce-scatter and all-gather.) Slow links are networks
        between hosts and between slices, and switches with less than a quarter of the fastest
        wire's bandwidth.

        Args:
          topology: what the mesh lies on.
          batch: sequences in a step, over all ranks; None stands for one on each rank of the batch.
          sequence: positions of a sequence.
          embed: features of an activation.
          dtype: of activations.
          tensor_axes: the tensor-parallel axes, where rules have other names; None takes those of
            ``heads`` and ``mlp`` that the batch is not split over.
          force: price slow links, and do not refuse them.

        Returns:
          For each group of axes that activations are summed over, what that costs in a layer; empty
          where nothing is tensor-parallel.

        Raises:
          TypeError: an argument has the wrong type.
          ValueError: tensor parallelism crosses a slow link, with its cost; the topology is
            unknown, or lacks a mesh axis of the rules; a size does not divide; the rules name
            neither ``heads`` nor ``mlp``, and ``tensor_axes`` is not given.
          ExceptionGroup: several such errors.

        Example:
          >>> from xcoll.sharding import tensor_parallel
          >>> topology = Topology.parse("4*h100:8", axes={"data": 4, "model": 8})
          >>> (cost,) = tensor_parallel().check(topology)
          >>> print(cost)
          4 all-reduces of bfloat16[1,2048,4096] (16 MiB) over axis 'model': ... per layer by native

        References:
          Shoeybi et al., "Megatron-LM", section 3.
        """
        if tensor_axes is not None:
            tensor_axes = as_tuple(normalised("Rules.check", "tensor_axes", tensor_axes))
        return check_tensor_axes(
            {name: as_tuple(axes) for name, axes in self.axes},
            topology,
            batch=batch,
            sequence=sequence,
            embed=embed,
            dtype=dtype,
            tensor_axes=tensor_axes,
            force=force,
        )


def _pairs(axes: Any) -> dict[str, Axes]:
    """Returns names and axes, checked.

    Raises:
      TypeError: they are neither a mapping nor pairs.
      ValueError: a name is empty or there twice, or its mesh axes are.
    """
    pairs = list(axes.items()) if isinstance(axes, Mapping) else axes
    is_pairs = isinstance(pairs, tuple | list) and all(
        isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs
    )
    if not is_pairs:
        raise TypeError(
            f"Rules({axes!r}): must be a mapping from logical names to mesh axes, such as"
            " {'batch': 'data', 'embed': None}"
        )
    out: dict[str, Axes] = {}
    for name, value in pairs:
        word("Rules", "axes", name)
        if name in out:
            raise ValueError(f"Rules(axes=...): logical name {name!r} is there twice; map it once")
        out[name] = normalised("Rules", name, value)
    return out
