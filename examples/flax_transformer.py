"""A decoder-only transformer in Flax NNX, its parameters and activations under logical names.

What each name is split over is said once, by `xcoll.sharding.Rules`; the model knows no mesh axis.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from xcoll.sharding import Rules


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of a model and its batch.

    Attributes:
      layers: blocks, one after another.
      embed: features of the residual stream.
      mlp: hidden features of the MLP.
      heads: attention heads.
      vocab: tokens.
      batch: sequences in a step, over all devices.
      sequence: positions of each.
      is_scanned: the blocks are one loop; else each stands in the program by itself.
    """

    layers: int = 16
    embed: int = 4096
    mlp: int = 16384
    heads: int = 32
    vocab: int = 32768
    batch: int = 64
    sequence: int = 2048
    is_scanned: bool = True


Place = Callable[..., jax.Array]
"""Constrains an activation: gets it and the logical names of its dimensions."""


class Block(nnx.Module):
    """Attention and an MLP, each after a norm and added to the residual stream."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.heads = config.heads
        self.norm_attention = _norm(config, rngs)
        self.norm_mlp = _norm(config, rngs)
        self.query = _linear(config.embed, config.embed, ("embed", "heads"), rngs)
        self.key = _linear(config.embed, config.embed, ("embed", "heads"), rngs)
        self.value = _linear(config.embed, config.embed, ("embed", "heads"), rngs)
        self.out = _linear(config.embed, config.embed, ("heads", "embed"), rngs)
        self.up = _linear(config.embed, config.mlp, ("embed", "mlp"), rngs)
        self.down = _linear(config.mlp, config.embed, ("mlp", "embed"), rngs)

    def __call__(self, x: jax.Array, place: Place) -> jax.Array:
        """Returns the residual stream after the block, ``[batch, sequence, embed]``."""
        h = self.norm_attention(x)
        shape = (*h.shape[:2], self.heads, -1)
        q, k, v = (f(h).reshape(shape) for f in (self.query, self.key, self.value))
        q, k, v = (place(t, "batch", "inner_sequence", "activation_heads", None) for t in (q, k, v))
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.reshape(h.shape))
        x = place(x, "batch", "sequence", "activation_embed")
        hidden = nnx.gelu(self.up(self.norm_mlp(x)))
        hidden = place(hidden, "batch", "inner_sequence", "activation_mlp")
        return place(x + self.down(hidden), "batch", "sequence", "activation_embed")


class Transformer(nnx.Module):
    """Embedding, blocks, and logits over the vocabulary."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.config = config
        init = nnx.with_partitioning(nnx.initializers.normal(0.02), ("vocab", "embed"))
        self.tokens = nnx.Param(init(rngs.params(), (config.vocab, config.embed)))
        self.norm = _norm(config, rngs)
        if config.is_scanned:

            @nnx.split_rngs(splits=config.layers)
            @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: "layers"})
            def stacked(rngs: nnx.Rngs) -> Block:
                return Block(config, rngs=rngs)

            self.blocks: Any = stacked(rngs)
        else:
            self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.layers)])

    def __call__(self, tokens: jax.Array, place: Place) -> jax.Array:
        """Returns logits, ``[batch, sequence, vocab]``, float32."""
        x = self.tokens[...].astype(jnp.bfloat16)[tokens]
        x = place(x, "batch", "sequence", "activation_embed")

        @nnx.remat
        def apply(block: Block, x: jax.Array) -> jax.Array:
            return block(x, place)

        if self.config.is_scanned:
            scan = nnx.scan(apply, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
            x = scan(self.blocks, x)
        else:
            for block in self.blocks:
                x = apply(block, x)
        logits = self.norm(x) @ self.tokens[...].astype(jnp.bfloat16).T
        return place(logits, "batch", "inner_sequence", "activation_vocab").astype(jnp.float32)


def train_step(config: Config, rules: Rules, mesh: Mesh) -> tuple[Any, tuple[Any, ...]]:
    """Returns a jitted training step and the shapes of its arguments, with shardings.

    Args:
      config: the sizes.
      rules: what each logical name is split over.
      mesh: the mesh.

    Returns:
      The step, which takes the state of model and optimizer and ``int32[batch, sequence]`` tokens,
      and returns the new state and the loss; and shapes of both arguments.
    """

    def make() -> tuple[Transformer, nnx.Optimizer]:
        model = Transformer(config, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adamw(1e-4), wrt=nnx.Param)

    with nnx.use_eager_sharding(False):
        graph, state = nnx.split(nnx.eval_shape(make))
    shardings = rules.shardings(state, mesh)

    def place(x: jax.Array, *names: str | None) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, rules.spec(names)))

    def step(state: nnx.State, tokens: jax.Array) -> tuple[nnx.State, jax.Array]:
        model, optimizer = nnx.merge(graph, state)

        def loss_of(model: Transformer) -> jax.Array:
            logits = model(tokens, place)[:, :-1]
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
            return losses.mean()

        loss, gradients = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), loss

    batch = NamedSharding(mesh, rules.spec(("batch", "sequence")))
    tokens = jax.ShapeDtypeStruct((config.batch, config.sequence), jnp.int32, sharding=batch)
    placed = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        state,
        shardings,
    )
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))
    return jitted, (placed, tokens)


def _linear(inputs: int, outputs: int, names: tuple[str, str], rngs: nnx.Rngs) -> nnx.Linear:
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), names)
    return nnx.Linear(
        inputs, outputs, use_bias=False, dtype=jnp.bfloat16, kernel_init=init, rngs=rngs
    )


def _norm(config: Config, rngs: nnx.Rngs) -> nnx.RMSNorm:
    scale = nnx.with_partitioning(nnx.initializers.ones, ("norm",))
    return nnx.RMSNorm(config.embed, dtype=jnp.bfloat16, scale_init=scale, rngs=rngs)
