"""The example on several hosts: variants against the clock, replicas, figures and curves."""

import doctest
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import lm_data
import lm_figures
import lm_job
import lm_options
import lm_processes
import lm_replicas
import numpy as np
import optax
import pytest
import train_lm
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from lm_devices import make_mesh
from lm_model import Config
from rich.console import Console

from xcoll import Topology, hlo

ROOT = Path(__file__).parent.parent
NAMES = ["plain", "exact", "int8", "int4"]
# Matrices of at least 64 KiB, which is what a codec is used from.
SMALL = ("--steps", "2", "--batch", "4", "--seq-len", "16", "--dim", "128", "--layers", "1")
TWO = ("--distributed", "--mesh", "host=2,device=2", "--topology", "2*cpu:2@200Mbit")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What a run of two processes with two devices each printed, and where it wrote."""
    out = tmp_path_factory.mktemp("out")
    cluster = ("-m", "bench.cluster", "--hosts", "2", "--devices", "2", "--loopback")
    script = ("--timeout", "300s", "--", "python", "examples/train_lm.py")
    command = [sys.executable, *cluster, *script, *TWO, *SMALL, "--json", "--out", str(out)]
    # Most of the time is the compiler's, twice; what it makes need not be fast here.
    environment = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done, out


def test_two_hosts_train_the_same_model_in_four_ways(trained):
    done, out = trained
    figures = json.loads(done.stdout)
    assert figures == json.loads((out / "summary.json").read_text())
    assert figures["checks"] == dict.fromkeys(figures["checks"], True)
    assert figures["replica_checks"] == 1
    assert list(figures["variants"]) == NAMES
    assert figures["machine"]["jax"] == jax.__version__
    assert figures["settings"]["mesh"] == {"host": 2, "device": 2}
    plain, exact, int8, int4 = figures["variants"].values()
    for row in figures["variants"].values():
        assert len(row["losses"]) == len(row["times_s"]) == 2
        assert all(4 < loss < 8 for loss in row["losses"])  # untrained, about log(256) = 5.5
        assert min(row["times_s"]) <= row["median_s"] <= max(row["times_s"])
        assert row["communication_s"] == row["median_s"] - figures["compute"]["median_s"]
        # The first loss is before any update: of the same parameters and text.
        assert row["losses"][0] == pytest.approx(plain["losses"][0], rel=1e-6)
    # AdamW moves by the sign of a gradient where it is small, so rounding may move the second loss.
    assert exact["losses"][1] == pytest.approx(plain["losses"][1], abs=1e-3)
    assert int4["losses"][1] != int8["losses"][1] != exact["losses"][1]
    # Without --target-loss it is the highest of the final losses, which all have reached.
    assert figures["target_loss"] == max(row["final_loss"] for row in figures["variants"].values())
    assert all(row["time_to_target_s"] <= sum(row["times_s"]) for row in (plain, exact, int8, int4))


def test_each_variant_sends_what_its_name_says(trained):
    _, out = trained
    plain, exact, int8, int4 = json.loads((out / "summary.json").read_text())["variants"].values()
    parameters = sum(np.prod(p.shape) for p in jax.tree.leaves(job(make_mesh({"d": 1})).params))
    # One flat ring of four: 2 * 3/4 of the payload passes each of the two links between hosts.
    # Nested: each host sends its half of the sum there and back, 2 * 1/2 of it. Sums are padded.
    assert plain["crossing_bytes"] == pytest.approx(2 * 1.5 * 4 * parameters, rel=0.01)
    assert 1 <= exact["crossing_bytes"] / (2 * 4 * parameters) < 1.06
    for row, bits in ((int8, 8), (int4, 4)):
        assert "s8" in row["wire_dtypes"]
        # And a scale a block, and small leaves as they are.
        assert bits / 32 < row["crossing_bytes"] / (2 * 4 * parameters) < 1.2 * bits / 32


def test_the_curves_are_drawn(trained):
    done, out = trained
    if importlib.util.find_spec("matplotlib") is None:
        assert "matplotlib is not installed" in done.stderr
        pytest.skip("matplotlib is not installed")
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((out / "summary.json").read_text())["plot"] == str(out / "loss.png")


def test_only_the_table_is_for_people(trained):
    done, _ = trained
    assert "ok   replicas identical" in done.stderr
    heads = next(line for line in done.stderr.splitlines() if NAMES[0] in line and "┃" in line)
    assert heads.replace("┃", "").split() == NAMES
    assert "…" not in done.stderr


def test_the_table_fits_80_columns(trained):
    figures = json.loads(trained[0].stdout)
    console = Console(width=80)
    with console.capture() as shown:
        console.print(lm_figures.table(figures))
    text = shown.get()
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    rows = {row[0]: row[1:] for line in text.splitlines() if len(row := cells(line)) == 5}
    losses = [f"{row['final_loss']:.4f}" for row in figures["variants"].values()]
    assert rows["loss"] == losses
    assert len(rows) == 11


def cells(line):
    return [cell.strip() for cell in re.split("[┃│]", line)[1:-1]]


def job(mesh: Mesh) -> lm_job.Job:
    return lm_job.Job(Config(seq_len=16, dim=128, layers=1), optax.adamw(1e-3), mesh)


def test_the_step_without_collectives_has_none_and_learns_from_its_own_text():
    eight = job(make_mesh({"host": 2, "device": 4}))
    text = np.random.default_rng(0).integers(0, 256, (8, 17)).astype(np.int32)
    state = lm_job.initial_state(eight, seed=0)
    step = jax.jit(train_lm.make_step(eight, alone=True))
    args = (*state, lm_data.place(text, eight.mesh))
    assert hlo.collectives(step.lower(*args).compile()) == ()
    moved, _, loss = step(*args)
    # The fifth device does what one device with the fifth sequence does.
    one = job(make_mesh({"device": 1}))
    first, _, expected = jax.jit(train_lm.make_step(one))(
        *lm_job.initial_state(one, seed=0), lm_data.place(text[4:5], one.mesh)
    )
    assert float(loss.addressable_shards[4].data) == pytest.approx(float(expected), rel=1e-5)
    for got, want, begin in zip(
        *map(jax.tree.leaves, (moved, first, lm_job.initial_state(one, 0)[0])), strict=True
    ):
        # As in AdamW's first step: by the learning rate, and the sign of the gradient.
        same = np.sign(np.asarray(got.addressable_shards[4].data) - np.asarray(begin)) == np.sign(
            np.asarray(want) - np.asarray(begin)
        )
        assert np.mean(same) > 0.99


def replicated(values, mesh: Mesh) -> jax.Array:
    """An array that is said to be the same on all devices, whatever it is."""
    parts = [jax.device_put(v, d) for v, d in zip(values, mesh.devices.flat, strict=True)]
    return jax.make_array_from_single_device_arrays(
        values[0].shape, NamedSharding(mesh, P()), parts
    )


def test_one_bit_of_one_replica_is_found():
    mesh = make_mesh({"device": 8})
    values = [np.ones(1000, np.float32) for _ in range(8)]
    alike = lm_replicas.digests({"w": replicated(values, mesh)})
    assert len(alike) == 8 and len(set(alike)) == 1
    values[5] = values[5].copy()
    values[5].view(np.uint32)[123] ^= 1
    unlike = lm_replicas.digests({"w": replicated(values, mesh)})
    assert [i for i in range(8) if unlike[i] != alike[i]] == [5]
    assert lm_replicas.check_alike("plain", [alike[:4], alike[4:]]) == alike[0]
    with pytest.raises(RuntimeError, match=r"int4, after step 10: replicas differ.* on 1\.1\b"):
        lm_replicas.check_alike("int4, after step 10", [unlike[:4], unlike[4:]])


def test_what_each_device_has_for_itself_is_not_compared():
    mesh = make_mesh({"device": 8})
    own = jax.device_put(np.arange(8.0, dtype=np.float32), NamedSharding(mesh, P("device")))
    assert len(set(lm_replicas.digests({"residual": own}))) == 1


@pytest.mark.parametrize("module", [lm_figures, lm_processes])
def test_examples_in_docstrings(module):
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize(
    ("unlike", "says"),
    [
        # The first would be an abort of Gloo, the second a wait without end.
        (("--dim", "48"), "--dim is 32 on process 0 and 48 on process 1; start all"),
        (("--steps", "3"), "--steps is 2 on process 0 and 3 on process 1; start all"),
        (
            ("--codec", "int8@host"),
            "error: --codec is not given on process 0 and int8@host on process 1; start all",
        ),
    ],
)
def test_processes_with_different_options(unlike, says):
    script = (
        "import os, sys; sys.path.insert(0, 'examples'); import train_lm;"
        f" own = {unlike!r} if os.environ['SLURM_PROCID'] == '1' else ();"
        " sys.exit(train_lm.main([*sys.argv[1:], *own]))"
    )
    cluster = ("-m", "bench.cluster", "--hosts", "2", "--devices", "2", "--loopback")
    command = [sys.executable, *cluster, "--timeout", "60s", "--", "python", "-c", script]
    options = (*TWO, "--steps", "2", "--batch", "4", "--seq-len", "16", "--dim", "32")
    done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True)
    printed = done.stdout + done.stderr
    assert done.returncode == 2, printed
    assert printed.count(says) == 2, printed


def test_a_loss_that_is_not_reached():
    assert lm_figures.time_to_loss_s([6.0, 5.0, 4.0], [1.0, 1.0, 1.0], 4.9) is None
    assert lm_figures.time_to_loss_s([6.0, 5.0, 4.0], [1.0, 1.0, 1.0], 5.0) == 3.0


def test_a_profile_is_a_topology(tmp_path, monkeypatch, capsys):
    path = tmp_path / "profile.json"
    mesh = make_mesh({"host": 2, "device": 4})
    with pytest.raises(SystemExit):
        train_lm.main(["--topology", str(path)])
    assert f"--topology: no file {str(path)!r}" in capsys.readouterr().err
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"^--topology and --mesh: .*profile\.json"):
        lm_options.read_topology(str(path), mesh)
    monkeypatch.setattr(Topology, "load", lambda *given: given)
    assert lm_options.read_topology(str(path), mesh) == (str(path), mesh)
    assert lm_options.read_topology("2*cpu:4@1Gbit", mesh) == "2*cpu:4@1Gbit"
