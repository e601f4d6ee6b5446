"""The example that `make demo` runs."""

import functools
import json
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import lm_data
import numpy as np
import optax
import pytest
import train_lm
from flax import nnx
from jax.sharding import Mesh
from lm_devices import make_mesh
from lm_model import Config, Transformer, next_byte_loss

import xcoll
from xcoll import aot, hlo

CONFIG = Config(seq_len=16, dim=32, heads=2, layers=1)
BATCH = 16


def make_job(mesh: Mesh, fsdp: bool, config: Config = CONFIG) -> train_lm.Job:
    return train_lm.Job(config, optax.adamw(1e-3), mesh, fsdp)


@functools.cache
def tokens() -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (BATCH, CONFIG.seq_len + 1)).astype(np.int32)


def split_model():
    graph, params = nnx.split(Transformer(CONFIG, nnx.Rngs(0)), nnx.Param)
    return graph, nnx.as_pure(params)


@functools.cache
def whole_batch_gradient():
    """The gradient on one device, without shard_map or a collective."""
    graph, params = split_model()
    return jax.jit(
        jax.grad(lambda params, tokens: next_byte_loss(nnx.merge(graph, params), tokens))
    )(params, tokens())


@pytest.mark.parametrize("fsdp", [False, True], ids=["replicated", "fsdp"])
@pytest.mark.parametrize("mesh", ["device=1", "host=2,device=4"])
@pytest.mark.parametrize("optimise", [False, True], ids=["plain", "optimised"])
def test_gradient_is_that_of_the_whole_batch_on_one_device(mesh, fsdp, optimise):
    job = make_job(make_mesh(mesh), fsdp)
    probe = train_lm.make_probe(job)
    if optimise:
        probe = xcoll.optimize(probe, policy=xcoll.Policy(algorithm="ring"))
    params, _ = train_lm.initial_state(job, seed=0)
    averaged, _ = jax.jit(probe)(params, lm_data.place(tokens(), job.mesh))
    # Both compute the same sum over 16 x 16 positions, in float32 and in different orders. Each
    # backward pass is some thirty operations deep, with dot products of up to 256 terms, and
    # rounds by less than 2^-24 * 30 * 256 of the largest element of a parameter.
    tolerance = 2**-24 * 30 * 256
    for got, want in zip(
        jax.tree.leaves(averaged), jax.tree.leaves(whole_batch_gradient()), strict=True
    ):
        got, want = np.asarray(got), np.asarray(want)
        assert got.shape == want.shape
        assert np.max(np.abs(got - want)) <= tolerance * np.max(np.abs(want))


@pytest.mark.parametrize("fsdp", [False, True], ids=["replicated", "fsdp"])
def test_a_step_moves_the_parameters_as_adamw_on_one_device_does(fsdp):
    job = make_job(make_mesh("host=2,device=4"), fsdp)
    params, state = train_lm.initial_state(job, seed=0)
    step = jax.jit(train_lm.make_step(job))
    moved, _, loss = step(params, state, lm_data.place(tokens(), job.mesh))
    _, alone = split_model()
    updates, _ = job.optimizer.update(whole_batch_gradient(), job.optimizer.init(alone), alone)
    expected = optax.apply_updates(alone, updates)
    assert 4 < float(loss) < 8  # untrained, about log(256) = 5.5
    for got, want, grad in zip(
        *(jax.tree.leaves(t) for t in (moved, expected, whole_batch_gradient())), strict=True
    ):
        # AdamW's first step is lr * g / (|g| + 1e-8): the sign of g, so rounding decides only
        # where g is next to nothing.
        clear = np.abs(grad) > 1e-5
        assert np.all(np.abs(np.asarray(got) - np.asarray(want))[clear] <= 1e-5)
        assert np.mean(clear) > 0.1


def test_fsdp_keeps_an_eighth_on_each_device():
    job = make_job(make_mesh("host=2,device=4"), fsdp=True)
    params, state = train_lm.initial_state(job, seed=0)
    for leaf in jax.tree.leaves((params, state)):
        if leaf.ndim:
            assert leaf.addressable_shards[0].data.size * 8 == leaf.size


def test_held_out_text_is_a_tenth_of_the_files_and_shares_none():
    corpus = lm_data.stdlib_corpus()
    assert 0.04 < len(corpus.held_out) / (len(corpus.held_out) + len(corpus.train)) < 0.2
    draw = lm_data.windows(corpus.train, 4, 32, (0, 1))
    assert draw.shape == (4, 33) and draw.dtype == np.int32
    assert np.array_equal(draw, lm_data.windows(corpus.train, 4, 32, (0, 1)))
    assert not np.array_equal(draw, lm_data.windows(corpus.train, 4, 32, (0, 2)))


SMALL = ("--steps", "2", "--batch", "16", "--seq-len", "16", "--dim", "64", "--layers", "1")


def run_example(tmp_path, *options: str) -> tuple[int, dict]:
    code = train_lm.main([*SMALL, "--out", str(tmp_path), *options])
    return code, json.loads((tmp_path / "summary.json").read_text())


@pytest.mark.parametrize("fsdp", [False, True], ids=["replicated", "fsdp"])
def test_end_to_end_forced(tmp_path, fsdp):
    options = ["--mesh", "host=2,device=4", "--topology", "2*cpu:4@200Mbit"]
    options += ["--algorithm", "hierarchical"] + ["--fsdp"] * fsdp
    code, summary = run_example(tmp_path, *options)
    assert summary["checks"] == dict.fromkeys(summary["checks"], True)
    assert code == 0
    plain, optimised = summary["runs"]["plain"], summary["runs"]["optimised"]
    assert len(plain["losses"]) == len(optimised["losses"]) == 2
    assert optimised["collectives"] != plain["collectives"]
    assert optimised["counted"] == optimised["predicted"]
    assert any(site["kept_reason"] is None for site in summary["report"]["sites"])


def test_end_to_end_on_one_device(tmp_path):
    code, summary = run_example(tmp_path, "--mesh", "device=1")
    assert code == 0
    assert summary["runs"]["plain"]["counted"] == {"device": 0}


def test_end_to_end_in_two_processes(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    script = str(Path(train_lm.__file__))
    options = ["--virtual-devices", "4", "--topology", "2*cpu:4@200Mbit", "--out", str(tmp_path)]
    processes = [
        subprocess.Popen(
            [sys.executable, script, *SMALL, *options, "--distributed", f"{address},2,{index}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(2)
    ]
    try:
        printed = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], printed
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["checks"] == dict.fromkeys(summary["checks"], True)
    assert summary["runs"]["optimised"]["collectives"].keys() > {"reduce-scatter", "all-gather"}


def test_a_topology_that_is_not_rewritten_for_fails(tmp_path):
    code, summary = run_example(
        tmp_path, "--mesh", "device=8", "--topology", "cpu:8", "--algorithm", "native"
    )
    assert code == 1
    assert summary["checks"]["rewritten"] is False


@pytest.mark.parametrize("fsdp", [False, True], ids=["replicated", "fsdp"])
@pytest.mark.parametrize(
    ("topology", "shape", "sums", "gathers"),
    [
        ("v5e:4x4", {"host": 4, "device": 4}, "ring", "ring"),
        ("h100:8", {"device": 8}, "halving_doubling", "recursive_doubling"),
    ],
    ids=["v5e:4x4", "h100:8"],
)
def test_compiles_ahead_of_time(topology, shape, sums, gathers, fsdp):
    mesh = aot.mesh(topology, tuple(shape.values()), tuple(shape))
    config = Config(seq_len=32, dim=64, layers=1)
    job = make_job(mesh, fsdp, config)
    batch = jax.ShapeDtypeStruct((2 * mesh.size, config.seq_len + 1), jnp.int32)
    state = jax.eval_shape(job.optimizer.init, job.params)
    args = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        (job.params, state, batch),
        job.shardings(job.specs),
    )
    policy = xcoll.Policy(algorithm={"psum": sums, "psum_scatter": sums, "all_gather": gathers})
    step = xcoll.optimize(train_lm.make_step(job), policy=policy)
    program = jax.jit(step, donate_argnums=(0, 1)).lower(*args).compile()
    kinds = {collective.kind for collective in hlo.collectives(program)}
    # Every sum and gather is made of permutes, and none is turned back into XLA's own.
    assert kinds == {"collective-permute"}
    assert not step.reports[-1].kept
