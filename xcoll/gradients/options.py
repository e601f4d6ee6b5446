"""The options of `sync`, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from xcoll.codecs import Codec
from xcoll.errors import unknown
from xcoll.gradients.compressor import Compressor
from xcoll.policy import Policy, check_policy

OPS = ("mean", "sum")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `sync` was asked for; see there.

    Raises:
      TypeError: an option is of a wrong type.
      ValueError: an option is out of range.
    """

    axes: tuple[str, ...]
    compressed: tuple[str, ...]
    policy: Policy | None
    compressor: Compressor | None
    bucket_bytes: int
    op: str
    mesh: Mesh | AbstractMesh | None
    seed: int

    def __post_init__(self) -> None:
        for name in ("bucket_bytes", "seed"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"sync({name}={value!r}): must be an integer")
        if self.bucket_bytes < 1:
            raise ValueError(f"sync(bucket_bytes={self.bucket_bytes}): must be positive")
        if self.op not in OPS:
            raise ValueError(unknown(f"sync(op={self.op!r})", "op", self.op, OPS))
        if self.policy is not None:
            check_policy("sync", self.policy)
        _check_compressor(self.compressor)
        if self.mesh is not None and not isinstance(self.mesh, Mesh | AbstractMesh):
            raise TypeError(f"sync(mesh={self.mesh!r}): must be a jax.sharding.Mesh")
        unknown_axes = [a for a in self.compressed if a not in self.axes]
        if unknown_axes:
            raise ValueError(
                unknown(
                    f"sync(compress_axis={unknown_axes[0]!r})", "axis", unknown_axes[0], self.axes
                )
                + " compress_axis is a part of axis_name."
            )

    @property
    def exact(self) -> tuple[str, ...]:
        """Axes that are reduced exactly, around the compression."""
        return tuple(a for a in self.axes if a not in self.compressed)


def axis_names(argument: str, value: Any) -> tuple[str, ...]:
    """Returns axis names as a tuple.

    Raises:
      TypeError: it is not a name or a tuple of names.
      ValueError: there is none, or one is repeated.
    """
    names = tuple(value) if isinstance(value, tuple | list) else (value,)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"{argument}={value!r}): must be an axis name or a tuple of them")
    if not names or len(set(names)) < len(names):
        raise ValueError(f"{argument}={value!r}): must name each axis once, and at least one")
    return names


def _check_compressor(compressor: Any) -> None:
    if compressor is None or isinstance(compressor, Compressor):
        return
    if isinstance(compressor, Codec):
        fix = "a codec has no state; pass gradients.error_feedback(codec), or Policy(codec=...)"
    else:
        fix = "pass one of gradients.error_feedback(codec), top_k, random_k, powersgd or sign()"
    raise TypeError(f"sync(compressor={compressor!r}): must be a gradients.Compressor; {fix}")
