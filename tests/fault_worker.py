"""One process of a run in which something goes wrong; see test_faults.py.

Its argument is JSON: what to do, by process id or for all. It prints lines of JSON: ``fault`` with
the time at which it does wrong, ``result`` with how it ended.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import jax
import numpy as np
from jax import lax

import xcoll
from xcoll.hardware import profiles

HERE = os.environ["SLURM_PROCID"]
ASKED = json.loads(sys.argv[1])
AXES = ("host", "device")


def mine(name, default=None):
    """What is asked of this process: its own, or what is asked of all."""
    value = ASKED.get(name, default)
    own = isinstance(value, dict) and value and all(key.isdigit() for key in value)
    return value.get(HERE, default) if own else value


def say(**what):
    print(json.dumps(what), flush=True)


def do(fault):
    say(fault=time.monotonic())
    if fault == "raises":
        raise ValueError("the data ran out")
    if fault == "cut":
        subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
    else:
        os.kill(os.getpid(), getattr(signal, fault))


def profile(text, mesh):
    """The topology of a profile that this process has, of a mesh as the text says."""
    path = Path(ASKED["directory"]) / f"profile{HERE}.json"
    shape = {name: int(size) for name, size in mesh.shape.items()}
    if text != "none":
        topology = json.loads(xcoll.Topology.parse(text, shape).to_json())
        content = {"system": asdict(profiles.System.of(mesh)), "topology": topology}
        path.write_text(profiles.encode(content))
    return xcoll.Topology.load(path, mesh)


def train(hosts):
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(jax.process_count(), -1), AXES)
    values = np.arange(mine("elements", 1024) * jax.device_count(), dtype=np.float32)
    sharding = jax.NamedSharding(mesh, jax.P(AXES))
    x = jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])
    fn = jax.shard_map(
        lambda v: lax.psum(v, AXES), mesh=mesh, in_specs=jax.P(AXES), out_specs=jax.P()
    )
    policy = xcoll.Policy(algorithm=mine("algorithm")) if mine("algorithm") else None
    topology = mine("topology")
    if mine("profile"):
        topology = profile(mine("profile"), mesh)
    step = jax.jit(xcoll.optimize(fn, policy=policy, topology=topology))
    expected = values.reshape(jax.device_count(), -1).sum(0)
    for number in range(mine("steps", 100_000)):
        np.testing.assert_array_equal(step(x).addressable_shards[0].data, expected)
        if number == 5 and mine("fault"):
            do(mine("fault"))
        time.sleep(mine("pause_s", 0.02) if number == 5 else 0.02)


def run():
    time.sleep(mine("delay_s", 0))
    if mine("plain"):
        jax.distributed.initialize()
        return train(None)
    if mine("when") == "jax starts":
        jax.distributed.initialize = lambda **_: do(mine("fault"))
    if mine("bare"):
        xcoll.initialize(**ASKED["initialize"])
        return train(None)
    with xcoll.initialize(**(ASKED["initialize"] | mine("own", {}))) as hosts:
        members.update(hosts.members)
        if mine("when") == "no step was made":
            do(mine("fault"))
        if mine("steps", 1):
            train(hosts)


def occupy():
    """Another program, which has the coordinator's port and says nothing."""
    server = socket.create_server(("", int(os.environ["JAX_COORDINATOR_ADDRESS"].split(":")[1])))
    threading.Thread(target=lambda: [server.accept() for _ in range(99)], daemon=True).start()
    return server


members = {}
held = occupy() if mine("occupied") else None
start = time.monotonic()
code = 0
try:
    if mine("neighbour"):  # packets to it go out and no answer comes, as through a firewall
        subprocess.run(
            ["ip", "neigh", "add", mine("neighbour"), "lladdr", "02:00:00:00:00:63", "dev", "eth0"],
            check=True,
        )
    if not mine("absent"):
        run()
    result = ["ended", "", [], []]
except Exception as error:
    lost = list(getattr(error, "process_ids", ()))
    result = [type(error).__name__, str(error), lost, list(getattr(error, "__notes__", ()))]
    code = 3
    if mine("wake") is not None:
        os.kill(members[mine("wake")].pid, signal.SIGCONT)
    if mine("uncaught"):
        raise
finally:
    say(result=result, at=time.monotonic(), after_s=time.monotonic() - start)
sys.exit(code)
