"""What the example trains: model, optimizer, devices, and how everything lies on them."""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import lm_data
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from lm_model import Config, Transformer

from xcoll import gradients

Tree = Any


@dataclass(frozen=True)
class Job:
    """What is trained, with what, on which devices, and how its parameters are laid out.

    Attributes:
      config: sizes of the model.
      optimizer: the optax transformation.
      mesh: the devices; every axis carries data.
      fsdp: keep each parameter, and its optimizer state, in shards over all devices.
      syncs: the optimizer averages gradients itself (`xcoll.gradients.sync`).
    """

    config: Config
    optimizer: optax.GradientTransformation
    mesh: Mesh
    fsdp: bool = False
    syncs: bool = False

    @functools.cached_property
    def model(self) -> Transformer:
        """The model with shapes in place of arrays."""
        return nnx.eval_shape(lambda: Transformer(self.config, nnx.Rngs(0)))

    @property
    def params(self) -> Tree:
        """Shapes and dtypes of the parameters."""
        return nnx.as_pure(nnx.state(self.model, nnx.Param))

    @property
    def shard_dims(self) -> Tree:
        """For each parameter the dimension it is cut along, or -1 where it is replicated."""

        def dim(param: jax.ShapeDtypeStruct) -> int:
            divides = [size % self.mesh.size == 0 for size in param.shape]
            return divides.index(True) if self.fsdp and any(divides) else -1

        return jax.tree.map(dim, self.params)

    @property
    def specs(self) -> tuple[Tree, Tree, PartitionSpec]:
        """Partition specs of the parameters, the optimizer state and the tokens."""
        axes = self.mesh.axis_names
        params = jax.tree.map(
            lambda dim: PartitionSpec() if dim < 0 else PartitionSpec(*[None] * dim, axes),
            self.shard_dims,
        )
        state = gradients.state_specs(
            jax.eval_shape(self.optimizer.init, self.params), self.params, params
        )
        return params, state, PartitionSpec(axes)

    def shardings(self, specs: Tree) -> Tree:
        """Turns partition specs into shardings on the mesh."""
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs)


def parameters(job: Job, seed: int) -> Callable[[], Tree]:
    """Returns a function, compiled once, that makes parameters; the same for the same seed."""

    def init() -> Tree:
        return nnx.as_pure(nnx.state(Transformer(job.config, nnx.Rngs(seed)), nnx.Param))

    return jax.jit(init, out_shardings=job.shardings(job.specs[0]))


def initializer(job: Job, make: Callable[[], Tree]) -> Callable[[], tuple[Tree, Tree]]:
    """Returns a function that makes parameters, by ``make``, and their optimizer state."""
    init = jax.jit(job.optimizer.init, out_shardings=job.shardings(job.specs[1]))

    def both() -> tuple[Tree, Tree]:
        params = make()
        return params, init(params)

    return both


def initial_state(job: Job, seed: int) -> tuple[Tree, Tree]:
    """Returns parameters and optimizer state, placed on the mesh; the same for the same seed."""
    return initializer(job, parameters(job, seed))()


def batches(text: np.ndarray, job: Job, args: argparse.Namespace, seed: int) -> Iterator[jax.Array]:
    """Yields batches of windows of the text, placed on the mesh."""
    for index in itertools.count():
        tokens = lm_data.windows(text, args.batch, args.seq_len, (seed, index))
        yield lm_data.place(tokens, job.mesh)
