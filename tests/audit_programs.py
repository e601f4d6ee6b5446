"""Training programs, and on paper the collectives that each is compiled to.

Every figure follows from the shapes and from what is said here and beside it. Three things hold
for all programs:

* A TPU multiplies matrices in bfloat16 unless told otherwise, and libtpu converts before it sends:
  what is read by nothing but matrix products after a gather, exchange or permute goes in two bytes
  an element (`_read_by_products`). What is summed stays in four.
* The partitioner reduces a gradient that is to be sharded by an all-reduce and a slice. XLA:TPU and
  XLA:GPU make a reduce-scatter of the two; XLA:CPU does not (`_sharded_sum`).
* All-reduces over the same axes that do not wait for each other are combined everywhere, and so
  are reduce-scatters; gathers and permutes by XLA:GPU alone.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from xcoll import aot

TARGETS = ("cpu", "tpu", "gpu")
F32 = 4
"""Bytes of a float32."""


class Sent(NamedTuple):
    """A row of an audit, as far as paper goes: operand bytes on a device, runs in a step."""

    kind: str
    axes: tuple[str, ...]
    num_bytes: int
    executions: int = 1


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program for a mesh, and what it sends on each target."""

    axes: dict[str, int]
    build: Callable[[Mesh], tuple[Callable[..., Any], tuple[Any, ...]]]
    sends: Callable[[str], list[Sent]]
    several: bool = False
    """Two TPU slices or GPU nodes, over the first axis."""

    def mesh(self, target: str) -> Mesh:
        shape, names = tuple(self.axes.values()), tuple(self.axes)
        if target == "cpu":
            return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names))
        one = {"tpu": "v5e:2x4", "gpu": "h100:8"}
        two = {"tpu": "2*v5e:2x2", "gpu": "2*h100:4"}
        return aot.mesh((two if self.several else one)[target], shape, names)

    def expected(self, target: str) -> Counter[Sent]:
        return Counter(self.sends(target))


def array(mesh: Mesh, *shape: int, spec: P = P()) -> jax.ShapeDtypeStruct:  # noqa: B008
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))


def _read_by_products(target: str, num_elements: int) -> int:
    return num_elements * (2 if target == "tpu" else F32)


def _sharded_sum(target: str) -> str:
    return "all-reduce" if target == "cpu" else "reduce-scatter"


def _descend(loss, params, *batch):
    """A step of gradient descent."""
    value, gradients = jax.value_and_grad(loss)(params, *batch)
    return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)


def _two_layers(weights, x, y):
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.mean((x - y) ** 2)


# Data parallel: weights on every device, the batch divided; the partitioner adds the sum.


def data_parallel(mesh):
    weights = [array(mesh, 256, 512), array(mesh, 512, 256)]
    batch = array(mesh, 1024, 256, spec=P("data"))
    return lambda w, x, y: _descend(_two_layers, w, x, y), (weights, batch, batch)


def data_parallel_sends(target):
    # Both gradients and the loss, summed at once.
    return [Sent("all-reduce", ("data",), (256 * 512 + 512 * 256 + 1) * F32)]


# FSDP: weights in eighths, gathered before use; gradients scattered back.


def fsdp(mesh):
    rows = P("data")
    weights = [array(mesh, 256, 512, spec=rows), array(mesh, 512, 256, spec=rows)]
    batch = array(mesh, 4096, 256, spec=rows)
    shardings = (NamedSharding(mesh, P()), [NamedSharding(mesh, rows)] * 2)
    step = jax.jit(lambda w, x, y: _descend(_two_layers, w, x, y), out_shardings=shardings)
    return step, (weights, batch, batch)


def fsdp_sends(target):
    # Without rematerialisation a weight is gathered once, for the forward and the backward pass.
    weight, data = 256 * 512, ("data",)
    gather = Sent("all-gather", data, _read_by_products(target, weight // 8))
    both = Sent("all-gather", data, 2 * weight // 8 * F32)
    gathers = [both] if target == "gpu" else [gather, gather]
    if target == "cpu":  # gradients and loss are all-reduces, so they are one
        return [*gathers, Sent("all-reduce", data, (2 * weight + 1) * F32)]
    loss = Sent("all-reduce", data, F32)
    return [*gathers, loss, Sent("reduce-scatter", data, 2 * weight * F32)]


# Tensor parallel: two residual blocks, each a product by columns and then one by rows.


def tensor_parallel(mesh):
    columns, rows = P(None, "model"), P("model")

    def loss(pairs, x, y):
        for up, down in pairs:
            x = x + jnp.tanh(x @ up) @ down
        return jnp.mean((x - y) ** 2)

    pair = (array(mesh, 256, 1024, spec=columns), array(mesh, 1024, 256, spec=rows))
    batch = array(mesh, 512, 256, spec=P("data"))
    shardings = [(NamedSharding(mesh, columns), NamedSharding(mesh, rows))] * 2
    step = jax.jit(lambda w, x, y: _descend(loss, w, x, y)[1], out_shardings=shardings)
    return step, ([pair, pair], batch, batch)


def tensor_parallel_sends(target):
    # Half of the batch on each device. Products by rows give partial sums: one all-reduce a block
    # forwards, and backwards one for the input of each block but the first, which no one asks for.
    activations = Sent("all-reduce", ("model",), 512 // 2 * 256 * F32)
    # Gradients of two weights of each of two blocks, a quarter of each on a device.
    gradients = Sent("all-reduce", ("data",), 2 * 2 * 256 * 1024 // 4 * F32)
    return [activations] * 3 + [gradients]


# Sequence parallel: between the products the sequence is divided, not repeated. Per shard.


def sequence_parallel(mesh):
    def loss(up, down, x):
        whole = lax.all_gather(x, "model", axis=1, tiled=True)
        part = jnp.tanh(whole @ up) @ down
        out = lax.psum_scatter(part, "model", scatter_dimension=1, tiled=True)
        return jnp.sum((out + x) ** 2)

    specs = (P(None, "model"), P("model"), P("data", "model"))
    shapes = ((256, 1024), (1024, 256), (8, 512, 256))
    fn = jax.shard_map(jax.grad(loss, (0, 1, 2)), mesh=mesh, in_specs=specs, out_specs=specs)
    args = tuple(array(mesh, *shape, spec=spec) for shape, spec in zip(shapes, specs, strict=True))
    return jax.jit(fn), args


def sequence_parallel_sends(target):
    # 4 of 8 sequences on a device, 512 long, of which it holds a quarter. Gather and scatter are
    # each other's transpose, so that there are two of both.
    whole = 4 * 512 * 256
    gather = Sent("all-gather", ("model",), _read_by_products(target, whole // 4))
    scatter = Sent("reduce-scatter", ("model",), whole * F32)
    gradients = Sent("all-reduce", ("data",), 2 * 256 * 1024 // 4 * F32)
    return [gather, gather, scatter, scatter, gradients]


# Mixture of experts: an expert a device, tokens to their experts and back. Per shard.


def experts(mesh):
    def loss(w, x):
        there = lax.all_to_all(x, "expert", split_axis=0, concat_axis=0, tiled=True)
        back = lax.all_to_all(
            jnp.tanh(there @ w[0]), "expert", split_axis=0, concat_axis=0, tiled=True
        )
        return jnp.sum((back + x) ** 2)

    spec = P("expert")
    fn = jax.shard_map(jax.grad(loss, (0, 1)), mesh=mesh, in_specs=spec, out_specs=spec)
    return jax.jit(fn), (array(mesh, 8, 256, 256, spec=spec), array(mesh, 64, 128, 256, spec=spec))


def experts_sends(target):
    # 128 tokens to each of 8 experts, there and back, and the same for the gradients. Tokens that
    # arrive go into products only; what comes back, and both gradients, into sums and tanh'.
    tokens, axis = 8 * 128 * 256, ("expert",)
    there = Sent("all-to-all", axis, _read_by_products(target, tokens))
    return [there] + 3 * [Sent("all-to-all", axis, tokens * F32)]


# Pipeline: 8 stages, 4 microbatches, each tick passes on what a stage has made. Per shard.


def pipeline(mesh):
    def stages(w, batches):
        stage = lax.axis_index("stage")
        ring = [(i, (i + 1) % 8) for i in range(8)]

        def tick(arrived, t):
            out = jnp.tanh(jnp.where(stage == 0, batches[jnp.minimum(t, 3)], arrived) @ w[0])
            return lax.ppermute(out, "stage", ring), out

        start = lax.pcast(jnp.zeros((128, 256)), "stage", to="varying")
        return lax.scan(tick, start, jnp.arange(4 + 8 - 1))[1][None, 7:]

    specs = (P("stage"), P())
    fn = jax.shard_map(stages, mesh=mesh, in_specs=specs, out_specs=P("stage"))
    return jax.jit(fn), (array(mesh, 8, 256, 256, spec=P("stage")), array(mesh, 4, 128, 256))


def pipeline_sends(target):
    # Of a microbatch, once a tick: 4 to begin, and 7 until the last has gone through.
    num_bytes = _read_by_products(target, 128 * 256)
    return [Sent("collective-permute", ("stage",), num_bytes, 4 + 7)]


# Scan over layers: FSDP of six layers, rematerialised, so that no layer is kept whole.


def scan_over_layers(mesh):
    rows = P(None, "data")

    def loss(weights, x, y):
        layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
        return jnp.mean((lax.scan(layer, x, weights)[0] - y) ** 2)

    batch = array(mesh, 4096, 512, spec=P("data"))
    step = jax.jit(
        lambda w, x, y: _descend(loss, w, x, y)[1], out_shardings=NamedSharding(mesh, rows)
    )
    return step, (array(mesh, 6, 512, 512, spec=rows), batch, batch)


def scan_over_layers_sends(target):
    # In both loops a layer is gathered for each of the six, and in the one backwards its gradient
    # is summed.
    gather = Sent("all-gather", ("data",), _read_by_products(target, 512 * 512 // 8), 6)
    return [gather, gather, Sent(_sharded_sum(target), ("data",), 512 * 512 * F32, 6)]


# Gradient accumulation: four microbatches in a loop, under the partitioner.


def accumulation(mesh):
    def step(w, batches):
        def add(total, x):
            return total + jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w), None

        return w - lax.scan(add, jnp.zeros_like(w), batches)[0]

    return step, (array(mesh, 256, 256), array(mesh, 4, 1024, 256, spec=P(None, "data")))


def accumulation_sends(target):
    # The partitioner sums each microbatch's gradient; XLA:TPU and XLA:GPU move the sum out of the
    # loop, since nothing in it reads the total.
    return [Sent("all-reduce", ("data",), 256 * 256 * F32, 4 if target == "cpu" else 1)]


# The same with weights and total in eighths: scattering cannot wait for the end.


def accumulation_in_shards(mesh):
    sharding = NamedSharding(mesh, P("data"))

    def step(w, batches):
        def add(total, x):
            gradient = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)
            return lax.with_sharding_constraint(total + gradient, sharding), None

        zeros = lax.with_sharding_constraint(jnp.zeros_like(w), sharding)
        return w - lax.scan(add, zeros, batches)[0]

    args = (array(mesh, 512, 512, spec=P("data")), array(mesh, 4, 1024, 512, spec=P(None, "data")))
    return jax.jit(step, out_shardings=sharding), args


def accumulation_in_shards_sends(target):
    # The weights do not change in the loop. XLA:CPU gathers them before it, as for any invariant;
    # the others do not let what a loop needs grow.
    times = 1 if target == "cpu" else 4
    gather = Sent("all-gather", ("data",), _read_by_products(target, 512 * 512 // 8), times)
    return [gather, Sent(_sharded_sum(target), ("data",), 512 * 512 * F32, 4)]


# Multi-slice: data parallel over two slices (nodes) of four.


def multi_slice(mesh):
    def step(w, x):
        return w - 0.1 * jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)

    return step, (array(mesh, 512, 512), array(mesh, 1024, 512, spec=P(("dcn", "ici"))))


def multi_slice_sends(target):
    gradient = 512 * 512 * F32
    if target != "tpu":  # one ring over all; NCCL makes its own of nodes
        return [Sent("all-reduce", ("dcn", "ici"), gradient)]
    # libtpu scatters the sum inside a slice, exchanges quarters with the other, and gathers.
    return [
        Sent("reduce-scatter", ("ici",), gradient),
        Sent("send", ("dcn",), gradient // 4),
        Sent("recv", ("dcn",), gradient // 4),
        Sent("all-gather", ("ici",), gradient // 4),
    ]


# The same with FSDP inside a slice: only quarters ever cross.


def multi_slice_fsdp(mesh):
    def step(w, x):
        return w - 0.1 * jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)

    sharding = NamedSharding(mesh, P("ici"))
    args = (array(mesh, 512, 512, spec=P("ici")), array(mesh, 4096, 512, spec=P(("dcn", "ici"))))
    return jax.jit(step, out_shardings=sharding), args


def multi_slice_fsdp_sends(target):
    weight = 512 * 512
    gather = Sent("all-gather", ("ici",), _read_by_products(target, weight // 4))
    inside = Sent(_sharded_sum(target), ("ici",), weight * F32)
    across = ("send", "recv") if target == "tpu" else ("all-reduce",)
    return [gather, inside, *(Sent(kind, ("dcn",), weight // 4 * F32) for kind in across)]


# Ring attention: keys and values go round, past the queries of every device. Per shard.


def ring_attention(mesh):
    ring = [(i, (i + 1) % 8) for i in range(8)]

    def attend(q, k, v):
        def step(state, _):
            k, v, total, weight = state
            scores = jnp.exp(jnp.einsum("hqd,hkd->hqk", q, k))
            total = total + jnp.einsum("hqk,hkd->hqd", scores, v)
            weight = weight + scores.sum(-1, keepdims=True)
            return (*(lax.ppermute(a, "seq", ring) for a in (k, v)), total, weight), None

        none = lax.pcast(jnp.zeros((*q.shape[:2], 1)), "seq", to="varying")
        _, _, total, weight = lax.scan(step, (k, v, jnp.zeros_like(q), none), None, length=8)[0]
        return total / weight

    spec = P(None, "seq")
    fn = jax.shard_map(attend, mesh=mesh, in_specs=spec, out_specs=spec)
    return jax.jit(fn), tuple(array(mesh, 4, 1024, 128, spec=spec) for _ in range(3))


def ring_attention_sends(target):
    # Keys and values of 4 heads, of an eighth of 1024 places; all eight steps pass them on.
    each, axis = 4 * 1024 // 8 * 128, ("seq",)
    if target == "gpu":  # both at once
        return [Sent("collective-permute", axis, 2 * each * F32, 8)]
    return [Sent("collective-permute", axis, _read_by_products(target, each), 8)] * 2


PROGRAMS = {
    build.__name__: Program(axes=axes, build=build, sends=sends, several="dcn" in axes)
    for build, sends, axes in (
        (data_parallel, data_parallel_sends, {"data": 8}),
        (fsdp, fsdp_sends, {"data": 8}),
        (tensor_parallel, tensor_parallel_sends, {"data": 2, "model": 4}),
        (sequence_parallel, sequence_parallel_sends, {"data": 2, "model": 4}),
        (experts, experts_sends, {"expert": 8}),
        (pipeline, pipeline_sends, {"stage": 8}),
        (scan_over_layers, scan_over_layers_sends, {"data": 8}),
        (accumulation, accumulation_sends, {"data": 8}),
        (accumulation_in_shards, accumulation_in_shards_sends, {"data": 8}),
        (multi_slice, multi_slice_sends, {"dcn": 2, "ici": 4}),
        (multi_slice_fsdp, multi_slice_fsdp_sends, {"dcn": 2, "ici": 4}),
        (ring_attention, ring_attention_sends, {"seq": 8}),
    )
}
