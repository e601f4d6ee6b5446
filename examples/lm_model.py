"""A byte-level decoder-only transformer in Flax NNX."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax
from flax import nnx


@dataclass(frozen=True)
class Config:
    """Sizes of the model; the defaults make 3.3 million parameters."""

    vocab: int = 256
    seq_len: int = 128
    dim: int = 256
    heads: int = 4
    layers: int = 4


class Block(nnx.Module):
    """Causal attention, then a feed-forward layer, each behind a norm and a residual."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        dim = config.dim
        self.heads = config.heads
        self.norm1, self.norm2 = nnx.RMSNorm(dim, rngs=rngs), nnx.RMSNorm(dim, rngs=rngs)
        self.qkv = nnx.Linear(dim, 3 * dim, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(dim, dim, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(dim, 4 * dim, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(4 * dim, dim, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[batch, seq, dim]`` to the same."""
        batch, seq, dim = x.shape
        heads = self.qkv(self.norm1(x)).reshape(batch, seq, 3, self.heads, dim // self.heads)
        q, k, v = heads[:, :, 0], heads[:, :, 1], heads[:, :, 2]
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.reshape(batch, seq, dim))
        return x + self.down(jax.nn.gelu(self.up(self.norm2(x))))


class Transformer(nnx.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(config.vocab, config.dim, rngs=rngs)
        self.position = nnx.Embed(config.seq_len, config.dim, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.layers)])
        self.norm = nnx.RMSNorm(config.dim, rngs=rngs)
        self.head = nnx.Linear(config.dim, config.vocab, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps ``int32[batch, seq]`` to ``float32[batch, seq, vocab]``."""
        x = self.embed(tokens) + self.position(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_byte_loss(model: Transformer, tokens: jax.Array) -> jax.Array:
    """Returns the mean cross-entropy, in nats a byte, over ``int32[batch, seq + 1]``."""
    logits = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
