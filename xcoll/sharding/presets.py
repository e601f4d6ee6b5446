"""The usual ways to split a transformer, as rules.

The logical names are the same in all of them. Of parameters: ``embed``, ``mlp``, ``heads``,
``kv_heads``, ``head_dim``, ``vocab``, ``expert``, ``layers`` and ``norm``. Of activations:
``batch``; ``sequence`` (the residual stream) and ``inner_sequence`` (inside attention and MLP,
where features are split instead); ``activation_embed``, ``activation_mlp``, ``activation_heads``,
``activation_kv_heads`` and ``activation_vocab``. Parameters and activations have different names,
since FSDP splits ``embed`` of the first, and not of the second, over the axis of the batch.
"""

from __future__ import annotations

from xcoll.sharding.mapped import Axes, as_tuple, normalised
from xcoll.sharding.rules import Rules

_NAMES = (
    "batch",
    "sequence",
    "inner_sequence",
    "embed",
    "mlp",
    "heads",
    "kv_heads",
    "head_dim",
    "vocab",
    "expert",
    "layers",
    "norm",
    "activation_embed",
    "activation_mlp",
    "activation_heads",
    "activation_kv_heads",
    "activation_vocab",
)
_FEATURES = ("mlp", "heads", "kv_heads", "vocab")


def data_parallel(*, data: Axes = "data") -> Rules:
    """Returns rules that split the batch, and keep every parameter whole on each device.

    Args:
      data: mesh axes of the batch.

    Example:
      >>> data_parallel().spec(("batch", "embed"))
      P('data', None)
    """
    return _rules(batch=data)


def fsdp(*, data: Axes = "data") -> Rules:
    """Returns rules that split the batch, and ``embed`` of every parameter, over the same axes.

    Args:
      data: mesh axes of both. To keep parameters whole across slices, split ``embed`` less:
        ``fsdp(data=("dcn", "data")).extend({"embed": "data"})``.

    Example:
      >>> fsdp().spec(("embed", "mlp")), fsdp().spec(("batch", "sequence", "activation_embed"))
      (P('data', None), P('data', None, None))

    References:
      Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
      section 5.3 (stage 3).
    """
    return _rules(batch=data, embed=data)


def tensor_parallel(*, data: Axes = "data", model: Axes = "model") -> Rules:
    """Returns rules that split heads, hidden features and the vocabulary, and the batch.

    Args:
      data: mesh axes of the batch; None on a mesh that has none.
      model: mesh axes of the features.

    Example:
      >>> tensor_parallel().spec(("embed", "mlp"))
      P(None, 'model')

    References:
      Shoeybi et al., "Megatron-LM", section 3.
    """
    return _rules(batch=data, **_features("tensor_parallel", model, data))


def fsdp_tensor(*, data: Axes = "data", model: Axes = "model") -> Rules:
    """Returns rules that split ``embed`` as `fsdp` does, and features as `tensor_parallel` does.

    Args:
      data: mesh axes of the batch, and of ``embed`` of parameters.
      model: mesh axes of the features.

    Example:
      >>> fsdp_tensor().spec(("embed", "mlp")), fsdp_tensor().spec(("batch", "activation_mlp"))
      (P('data', 'model'), P('data', 'model'))
    """
    return _rules(batch=data, embed=data, **_features("fsdp_tensor", model, data))


def sequence_parallel(*, data: Axes = "data", model: Axes = "model") -> Rules:
    """Returns rules of `tensor_parallel` that split the residual stream along the sequence too.

    Between blocks (norms, residuals, dropout), where no feature is split, ``sequence`` is split
    over the model axes; inside, call it ``inner_sequence``.

    Args:
      data: mesh axes of the batch; None on a mesh that has none.
      model: mesh axes of the features inside blocks, and of the sequence between them.

    Example:
      >>> rules = sequence_parallel()
      >>> rules.spec(("batch", "sequence", "activation_embed"))
      P('data', 'model', None)
      >>> rules.spec(("batch", "inner_sequence", "activation_mlp"))
      P('data', None, 'model')

    References:
      Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models",
      section 4.2.2.
    """
    features = _features("sequence_parallel", model, data)
    return _rules(batch=data, sequence=model, **features)


def expert_parallel(*, data: Axes = "data", expert: Axes = "expert") -> Rules:
    """Returns rules that give each rank of an axis experts of its own.

    The batch is split over the experts' axes too, so that outside the experts they are data
    parallel.

    Args:
      data: mesh axes of the batch alone; None on a mesh that has none.
      expert: mesh axes of the experts.

    Example:
      >>> rules = expert_parallel()
      >>> rules.spec(("expert", "embed", "mlp")), rules.spec(("batch", "sequence"))
      (P('expert', None, None), P(('data', 'expert'), None))

    References:
      Lepikhin et al., "GShard", section 3.
    """
    _check_apart("expert_parallel", data=data, expert=expert)
    return _rules(batch=(*_tuple("data", data), *_tuple("expert", expert)), expert=expert)


def _rules(**axes: Axes) -> Rules:
    return Rules({name: axes.get(name) for name in _NAMES})


def _features(call: str, model: Axes, data: Axes) -> dict[str, Axes]:
    _check_apart(call, data=data, model=model)
    return {prefix + name: model for name in _FEATURES for prefix in ("", "activation_")}


def _check_apart(call: str, **groups: Axes) -> None:
    """Checks that no mesh axis is in both groups."""
    first, second = ((key, as_tuple(normalised(call, key, v))) for key, v in groups.items())
    both = [axis for axis in first[1] if axis in second[1]]
    if both:
        raise ValueError(
            f"{call}({first[0]}={groups[first[0]]!r}, {second[0]}={groups[second[0]]!r}): mesh axis"
            f" {both[0]!r} is in both; give each its own"
        )


def _tuple(name: str, axes: Axes) -> tuple[str, ...]:
    return as_tuple(normalised("expert_parallel", name, axes))
