"""Trains a small language model twice: the plain step, then the same step through xcoll.

The step below is ordinary JAX. xcoll is one line::

    jax.jit(xcoll.optimize(step, topology=...), donate_argnums=(0, 1))

Eight virtual devices, planned as two hosts behind a slow link::

    python examples/train_lm.py --virtual-devices 8 --mesh host=2,device=4 \
        --topology '2*cpu:4@200Mbit'

The same with int8 between the hosts, as a third run beside the other two::

    python examples/train_lm.py --virtual-devices 8 --mesh host=2,device=4 \
        --topology '2*cpu:4@200Mbit' --codec int8@host

The devices that are there (TPU, GPU or CPU)::

    python examples/train_lm.py

Several processes: plain, exact, int8 and int4 with error feedback in turn, against the clock::

    srun python examples/train_lm.py --distributed
    python -m bench.cluster --hosts 2 --devices 4 --rate 200mbit -- python examples/train_lm.py \
        --distributed --mesh host=2,device=4 --topology '2*cpu:4@200Mbit'
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import lm_compare
import lm_compressed
import lm_data
import lm_hosts
import lm_runs
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from lm_devices import initialize_processes, make_mesh, use_virtual_devices
from lm_job import Job, batches, initial_state
from lm_model import Config, next_byte_loss
from lm_options import arguments, common, fail, read_topology, settings
from lm_processes import Processes, check_alike
from rich.console import Console

import xcoll
from xcoll.streams import python_alone

Tree = Any


def make_gradients(job: Job) -> tuple[Callable[..., Any], Callable[[Tree], Tree]]:
    """Returns the two halves of a gradient, to be called inside `jax.shard_map`.

    The first maps (parameters, tokens) to this device's loss and gradient, the second
    averages gradients over the devices.
    """
    axes, num_devices, dims = job.mesh.axis_names, job.mesh.size, job.shard_dims
    graph = nnx.graphdef(job.model)

    def loss_of(params: Tree, tokens: jax.Array) -> jax.Array:
        return next_byte_loss(nnx.merge(graph, params), tokens)

    def whole(param: jax.Array, dim: int) -> jax.Array:
        if dim < 0:
            # Varying: so that the gradient is this device's own, and the sum ours to write.
            return jax.lax.pcast(param, axes, to="varying")
        return jax.lax.all_gather(param, axes, axis=dim, tiled=True)

    def mean(grad: jax.Array, dim: int) -> jax.Array:
        if dim < 0:
            return jax.lax.pmean(grad, axes)
        total = jax.lax.psum_scatter(grad, axes, scatter_dimension=dim, tiled=True)
        return total / num_devices

    def local(params: Tree, tokens: jax.Array) -> tuple[jax.Array, Tree]:
        return jax.value_and_grad(loss_of)(jax.tree.map(whole, params, dims), tokens)

    return local, lambda grads: jax.tree.map(mean, grads, dims)


def make_step(job: Job, *, alone: bool = False) -> Callable[..., Any]:
    """Returns ``step(params, opt_state, tokens) -> (params, opt_state, loss)``.

    With ``alone`` the same step without its collectives: each device learns from its own gradients
    and keeps parameters of its own, whatever their sharding says. That is for a stopwatch.
    """
    local_gradients, average = make_gradients(job)

    def step(params: Tree, opt_state: Tree, tokens: jax.Array) -> tuple[Tree, Tree, jax.Array]:
        loss, grads = local_gradients(params, tokens)
        grads = grads if job.syncs or alone else average(grads)
        updates, opt_state = job.optimizer.update(grads, opt_state, params)
        loss = loss if alone else jax.lax.pmean(loss, job.mesh.axis_names)
        return optax.apply_updates(params, updates), opt_state, loss

    params, state, tokens = job.specs
    return jax.shard_map(
        step,
        mesh=job.mesh,
        in_specs=(params, state, tokens),
        out_specs=(params, state, PartitionSpec()),
        check_vma=not alone,
    )


def make_probe(job: Job) -> Callable[..., Any]:
    """Returns ``probe(params, tokens) -> (averaged, per device)``: the step's gradients alone."""
    local_gradients, average = make_gradients(job)

    def probe(params: Tree, tokens: jax.Array) -> tuple[Tree, Tree]:
        _, grads = local_gradients(params, tokens)
        return average(grads), jax.tree.map(lambda grad: grad[None], grads)

    params, _, tokens = job.specs
    return jax.shard_map(
        probe, mesh=job.mesh, in_specs=(params, tokens), out_specs=(params, tokens)
    )


def set_up(args: argparse.Namespace) -> tuple[Mesh, contextlib.AbstractContextManager[object]]:
    """Returns the mesh and the processes; all is checked that can stop it before it trains."""
    hosts: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    try:
        if args.virtual_devices:
            use_virtual_devices(args.virtual_devices)
        if args.distributed is not None:
            hosts = initialize_processes(args.distributed)
            check_alike(Processes(name="options").gather(common(args)))
        mesh = make_mesh(args.mesh)
        args.hardware = read_topology(args.topology, mesh)
        if args.compression:
            args.compression.check(mesh, args.fsdp)
        if args.batch % mesh.size:
            raise ValueError(
                f"--batch {args.batch}: must divide by the {mesh.size} devices; --batch"
                f" {-(-args.batch // mesh.size) * mesh.size} does"
            )
        if jax.process_index() == 0:
            args.out.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=args.out).close()  # May it be written to?
    except OSError as err:
        fail(f"--out {args.out}: {err.strerror}")
    except (ValueError, RuntimeError) as err:
        fail(err)
    return mesh, hosts


def main(argv: list[str] | None = None) -> int:
    """Trains in each way and compares; returns 1 where they do not agree."""
    args = arguments(argv, (__doc__ or "").splitlines()[0])
    mesh, hosts = set_up(args)
    with python_alone(), hosts:  # which names a process that is lost in all others
        return train(args, mesh)


def train(args: argparse.Namespace, mesh: Mesh) -> int:
    """Trains on a mesh; returns 1 where the ways do not agree."""
    corpus = lm_data.stdlib_corpus()
    if args.seq_len + 1 >= len(corpus.held_out):
        fail(f"--seq-len {args.seq_len}: the held-out text has {len(corpus.held_out)} bytes")
    config = Config(seq_len=args.seq_len, dim=args.dim, layers=args.layers)
    job = Job(config, optax.adamw(args.lr), mesh, args.fsdp)
    # A log has no width of its own; 80 columns would squeeze the table of collectives.
    width = None if sys.stdout.isatty() else 120
    console = Console(quiet=jax.process_index() != 0, width=width, stderr=args.json)
    graph = nnx.graphdef(job.model)
    evaluate = jax.jit(lambda params, tokens: next_byte_loss(nnx.merge(graph, params), tokens))
    windows = list(itertools.islice(batches(corpus.held_out, job, args, 0), 8))

    def held_out(params: Tree) -> float:
        return float(np.mean([evaluate(params, tokens) for tokens in windows]))

    if args.variants:
        return lm_hosts.run(
            job, args, corpus, make_step=make_step, make_probe=make_probe,
            held_out=held_out, console=console,
        )  # fmt: skip
    return pair(job, args, corpus, held_out=held_out, console=console)


def pair(
    job: Job,
    args: argparse.Namespace,
    corpus: lm_data.Corpus,
    *,
    held_out: Callable[[Tree], float],
    console: Console,
) -> int:
    """Trains plain and optimised, and with a codec or a compressor where one was asked for."""
    mesh = job.mesh
    step, probe = make_step(job), make_probe(job)

    policy = xcoll.Policy(algorithm=args.algorithm)
    optimised = xcoll.optimize(step, policy=policy, topology=args.hardware)
    steps, jobs = {"plain": step, "optimised": optimised}, {"plain": job, "optimised": job}
    if (third := args.compression) is not None:
        optimizer, lossy = third.apply(job.optimizer, policy, mesh)
        jobs[third.name] = replace(job, optimizer=optimizer, syncs=optimizer is not job.optimizer)
        steps[third.name] = xcoll.optimize(
            make_step(jobs[third.name]), policy=lossy, topology=args.hardware
        )

    copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))
    state = initial_state(job, args.seed)
    plain, exact, *others = lm_runs.train(
        {name: jax.jit(function, donate_argnums=(0, 1)) for name, function in steps.items()},
        lambda name: copy(state) if jobs[name] is job else initial_state(jobs[name], args.seed),
        batches(corpus.train, job, args, args.seed),
        num_steps=args.steps,
        held_out=held_out,
        mesh=mesh,
        console=console,
        topology=args.hardware,
    )
    report = optimised.reports[-1]

    tokens = next(batches(corpus.train, job, args, args.seed))
    unchanged = xcoll.explain(
        step, *state, tokens, policy=xcoll.Policy.native(), topology=args.hardware
    )
    optimised_probe = xcoll.optimize(probe, policy=policy, topology=args.hardware)
    gradient, found = lm_compare.check_gradients(probe, optimised_probe, state[0], tokens)
    # A profile may say that XLA's own collectives are the fastest.
    is_planned = mesh.size > 1 and bool(args.algorithm or isinstance(args.hardware, str))
    further = None
    if third is not None:
        lossy_probe = xcoll.optimize(probe, policy=lossy, topology=args.hardware)
        error = lm_compressed.gradient_error(
            found,
            jax.jit(lossy_probe)(state[0], tokens)[0],
            lossy_probe.reports[-1],
            lm_compare.roundings(optimised_probe.reports[-1], mesh.size - 1),
        )
        further = lm_compressed.compare(
            exact,
            others[0],
            compression=third,
            exact_predicted=report.wire_bytes(),
            report=steps[third.name].reports[-1],
            gradient=error if third.compressor is None else None,
            mesh=mesh,
            is_expected=is_planned or third.compressor is not None,
            max_ratio=args.max_ratio,
        )
    return lm_compare.compare(
        plain,
        exact,
        predicted=(unchanged.wire_bytes(), report.wire_bytes()),
        gradient=gradient,
        report=report,
        rewrite_expected=is_planned,
        settings=settings(args, mesh),
        out=args.out,
        console=console,
        further=further,
    )


if __name__ == "__main__":
    sys.exit(main())
