"""Two processes measure together, end with one profile, and do not run with two."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import processes
import pytest

ROOT = Path(__file__).parent.parent
BUDGET_S = 4


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """What ``xcoll tune`` prints on two hosts of two devices, its profile, and seconds."""
    folder = tmp_path_factory.mktemp("tuned")
    profile = folder / "two.json"
    cluster = ["--hosts", "2", "--devices", "2", "--loopback", "--logs", str(folder), "--timeout"]
    command = ["tune", "--distributed", "--mesh", "host=2,device=2", "--budget", f"{BUDGET_S}s"]
    start = time.monotonic()
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "bench.cluster", *cluster, "100s", "--"),
            *("python", "-m", "xcoll", *command, "--out", str(profile), "--json"),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    took_s = time.monotonic() - start
    assert ran.returncode == 0, ran.stderr + ran.stdout
    return json.loads(ran.stdout), profile, took_s, folder


def test_the_budget_holds_for_all_processes(tuned):
    _, _, took_s, _ = tuned
    # The processes start, and import jax, before; without a budget it takes minutes.
    assert took_s < BUDGET_S + 25


def test_the_first_prints_what_is_in_the_file_and_the_other_nothing(tuned):
    printed, profile, _, folder = tuned
    assert printed == json.loads(profile.read_text())
    assert "{" not in (folder / "host1.log").read_text()


def test_what_is_measured_between_two_processes(tuned):
    printed, *_ = tuned
    assert printed["system"]["axis_sizes"] == [2, 2]
    assert printed["system"]["places"] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    found = {(s["kind"], tuple(s["axes"])) for s in printed["samples"]}
    assert ("one_way", ("host",)) in found and ("shift", ("device",)) in found
    host = printed["topology"]["axes"][0]["levels"][0]
    assert host["shared_by"] == 2 and host["link"]["network"] == "switch"
    assert {"step", "host: bandwidth", "host: latency"} <= {t["name"] for t in printed["terms"]}


WORKER = """
import os

import numpy as np
from jax import lax

import xcoll
from xcoll.hardware import profiles

profile = os.environ["PROFILE"]
axes = ("host", "device")
mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), axes)
spec = jax.NamedSharding(mesh, jax.P(axes))
x = jax.make_array_from_callback((32,), spec, lambda i: np.arange(32, dtype=np.float32)[i])


def run(name, path):
    fn = jax.shard_map(
        lambda v: lax.psum(v, axes), mesh=mesh, in_specs=jax.P(axes), out_specs=jax.P()
    )
    ours = xcoll.optimize(fn, topology=xcoll.Topology.load(path, mesh))
    try:
        out = np.asarray(jax.jit(ours)(x).addressable_shards[0].data)
        results[name] = [out.tolist(), str(ours.reports[-1])]
    except xcoll.PlanMismatchError as error:
        results[name] = ["PlanMismatchError", str(error)]


run("alike", profile)
# One process has an older profile: its steps took longer.
content = json.loads(open(profile).read())
del content["version"], content["checksum"]
content["topology"]["device"]["step_ps"] += 10**9
mine = os.path.join(os.path.dirname(profile), f"mine{here}.json")
if here == 1:
    profiles.write(mine, profiles.encode(content))
else:
    profiles.write(mine, open(profile).read())
run("unlike", mine)

# Together again, in one process group: the fit of the first holds for both.
own = os.path.join(os.path.dirname(profile), f"own{here}.json")
tuned = xcoll.tune(mesh, budget_s=1.5, out=own)
results["tuned"] = [tuned.topology.fingerprint, open(own).read()]
other = jax.sharding.Mesh(mesh.devices if here else mesh.devices.T, axes)
try:
    xcoll.tune(other, budget_s=1)
    results["other mesh"] = "measured"
except xcoll.PlanMismatchError as error:
    results["other mesh"] = str(error)
"""


@pytest.fixture(scope="module")
def results(tuned):
    """What each process saw; both have ended."""
    os.environ["PROFILE"] = str(tuned[1])
    try:
        return processes.run(WORKER)
    finally:
        del os.environ["PROFILE"]


def test_alike_profiles_run_and_the_report_names_them(results):
    expected = [float(sum(range(i, 32, 8))) for i in range(8)]
    for result in results:
        out, report = result["alike"]
        assert out == expected
        assert "profile two.json" in report


def test_unlike_profiles_are_an_error_on_both_that_names_both(results):
    for result in results:
        kind, message = result["unlike"]
        assert kind == "PlanMismatchError"
        assert "profile mine0.json" in message and "profile mine1.json" in message


def test_all_processes_end_with_the_same_profile(results):
    first, second = (result["tuned"] for result in results)
    assert first == second
    assert json.loads(first[1])["topology"]["measured"]


def test_different_meshes_are_an_error_on_both(results):
    for result in results:
        assert "process 0: fingerprint" in result["other mesh"]
        assert "process 1: fingerprint" in result["other mesh"]
