"""The example that audits a Flax transformer, at a small size: its traffic is known on paper."""

import collections
import json
import subprocess
import sys
from pathlib import Path

import audit_flax
import pytest
from flax_transformer import Config

from xcoll import aot, hlo

ROOT = Path(__file__).parent.parent
SMALL = Config(layers=3, embed=512, mlp=2048, heads=8, vocab=1024, batch=8, sequence=256)
DATA, MODEL = 2, 4


@pytest.fixture(scope="module")
def found():
    return audit_flax.audited("h100:8", {"data": DATA, "model": MODEL}, SMALL)


def test_the_traffic_of_fsdp_and_tensor_parallelism(found):
    sent = collections.Counter()
    for row in found.rows:
        if row.executions == SMALL.layers and row.dtypes == ("bf16",):
            sent[row.kind, row.axes] += row.num_bytes
    # The matrices of a block in bfloat16: query, key, value and out, up and down.
    block = 2 * (4 * SMALL.embed**2 + 2 * SMALL.embed * SMALL.mlp)
    # Each device has its part of them, and gathers the others' along ``data``: in the forward
    # pass, and again in the backward one, since blocks are computed again there.
    assert sent["all-gather", ("data",)] == 2 * block // (DATA * MODEL)
    # Their gradients, summed over ``data``, each device keeping its part.
    assert sent["reduce-scatter", ("data",)] == block // MODEL
    # The residual stream is summed over ``model`` after attention and after the MLP: forward and
    # backward. Computed again is the first of these only; nothing needs the second.
    stream = 2 * SMALL.batch // DATA * SMALL.sequence * SMALL.embed
    assert sent["all-reduce", ("model",)] == 5 * stream


def test_no_one_wrote_a_collective(found):
    assert {row.made_by for row in found.rows} == {"partitioner"}
    assert found.is_complete
    lines = {row.source for row in found.rows if not row.is_near}
    assert {line.rpartition(":")[0] for line in lines} == {
        str(ROOT / "examples/flax_transformer.py")
    }


def test_times_and_memory_add_up(found):
    assert found.compute_s > 0 and 0 < found.exposed_s <= found.communication_s
    # Parameters, and two moments of them, in float32, over all devices; tokens on top.
    block = 4 * SMALL.embed**2 + 2 * SMALL.embed * SMALL.mlp
    whole = 3 * 4 * (SMALL.layers * block + SMALL.vocab * SMALL.embed)
    share = whole // (DATA * MODEL)
    assert share < found.memory.arguments < 1.05 * share
    assert found.memory.aliased > share  # The state is donated.


def test_it_says_how_to_use_it():
    command = [sys.executable, "examples/audit_flax.py", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "--topology" in done.stdout and "--timeline" in done.stdout


def test_the_program_of_the_command_line(found):
    mesh = aot.mesh("h100:8", (DATA, MODEL), ("data", "model"))
    step, args = audit_flax.fsdp_tensor(mesh, SMALL)
    assert callable(step) and len(args) == 2
    assert json.loads(found.to_json())["totals"]["counts"] == found.counts()
    assert hlo.Audit.from_json(found.to_json()) == found
