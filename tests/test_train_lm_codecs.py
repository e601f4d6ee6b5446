"""The example with a codec or a compressor: options, the third run, and its checks."""

import io
import json
import math

import jax
import jax.numpy as jnp
import lm_codecs
import lm_compressed
import lm_data
import lm_job
import lm_options
import lm_runs
import numpy as np
import optax
import processes
import pytest
import train_lm
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from lm_devices import make_mesh
from lm_model import Config
from rich.console import Console

import xcoll
from xcoll import codecs, gradients

HOSTS = {"host": 2, "device": 4}
# Matrices of at least 64 KiB, which is what a codec is used from.
SMALL = ("--steps", "2", "--batch", "8", "--seq-len", "16", "--dim", "128", "--layers", "1")
SLOW = ("--mesh", "host=2,device=4", "--topology", "2*cpu:4@200Mbit")


def run_example(tmp_path, *options: str) -> tuple[int, dict]:
    code = train_lm.main([*SMALL, *SLOW, "--out", str(tmp_path), *options])
    return code, json.loads((tmp_path / "summary.json").read_text())


def elements(leaf_filter) -> int:
    """Elements of the small model's parameters that pass."""
    job = lm_job.Job(Config(seq_len=16, dim=128, layers=1), optax.adamw(1e-3), make_mesh(HOSTS))
    return sum(math.prod(p.shape) for p in jax.tree.leaves(job.params) if leaf_filter(p))


def test_int8_between_hosts_end_to_end(tmp_path):
    code, summary = run_example(tmp_path, "--codec", "int8@host", "--max-ratio", "0.3")
    assert summary["checks"] == dict.fromkeys(summary["checks"], True)
    assert code == 0
    assert summary["settings"]["compression"] == "int8@host"
    runs, found = summary["runs"], summary["compressed"]
    assert list(runs) == ["plain", "optimised", "int8@host"]
    exact, compressed = runs["optimised"], runs["int8@host"]
    assert compressed["busiest"] == compressed["predicted"]
    assert found["ratio"] == compressed["busiest"]["host"] / exact["busiest"]["host"]
    # A byte for four, a scale for 256 of them; small leaves stay float32.
    large = elements(lambda p: math.prod(p.shape) * 4 >= 64 << 10)
    small = elements(lambda p: math.prod(p.shape) * 4 < 64 << 10)
    # Of a host's four devices each sends a quarter; what is more is padding.
    devices = 4
    least = (large * (1 + 1 / 256) + 4 * small) / devices
    assert least <= compressed["busiest"]["host"] < 1.1 * least
    whole = 4 * (large + small) / devices
    assert whole <= exact["busiest"]["host"] < 1.1 * whole
    assert set(exact["dtypes"]["host"]) == {"f32"}
    assert compressed["dtypes"]["host"]["s8"] > 0.9 * sum(compressed["dtypes"]["host"].values())
    # The first loss is before any update.
    assert compressed["losses"][0] == exact["losses"][0]
    assert compressed["losses"][1] != exact["losses"][1]
    assert 0 < found["gradient"]["max_difference"] <= found["gradient"]["bound_there"]


def test_a_ratio_that_is_missed_fails(tmp_path, capsys):
    code, summary = run_example(tmp_path, "--codec", "bfloat16@host", "--max-ratio", "0.27")
    assert code == 1
    failed = [name for name, passed in summary["checks"].items() if not passed]
    assert failed == ["bytes_over_host_at_most_0.27"]
    assert "FAIL bytes over host at most 0.27" in capsys.readouterr().out
    assert 0.5 < summary["compressed"]["ratio"] < 0.56
    assert set(summary["compressed"]["wire_dtypes"]) == {"u16", "f32"}


def test_a_codec_for_all_axes_with_shards(tmp_path):
    code, summary = run_example(tmp_path, "--codec", "int8", "--fsdp")
    assert code == 0
    assert summary["checks"] == dict.fromkeys(summary["checks"], True)
    assert "s8" in summary["compressed"]["wire_dtypes"]


@pytest.mark.parametrize(
    ("options", "dtype", "least", "most"),
    [
        # Parts of float32's bytes: a byte and a scale for four; all small leaves too.
        (("--codec", "int8@host", "--error-feedback"), "s8", 0.25, 0.27),
        # Top-k gathers 1 % of values with indices from both hosts, where a sum is 4 bytes each:
        # 1,324 words of a rank, which permutes take as 11 rows of 128.
        (("--compressor", "top_k:0.01@host"), "s32", 0.0198, 0.0198 * 11 * 128 / 1324 + 2e-4),
        (("--compressor", "sign@host"), "u8", 1 / 32, 1 / 16),
        (("--compressor", "powersgd:4@host"), "f32", 0.03, 0.4),
    ],
    ids=["int8", "top_k", "sign", "powersgd"],
)
def test_compressors_end_to_end(tmp_path, options, dtype, least, most):
    code, summary = run_example(tmp_path, *options)
    assert summary["checks"] == dict.fromkeys(summary["checks"], True)
    assert code == 0
    found = summary["compressed"]
    assert least < found["ratio"] < most
    assert max(found["wire_dtypes"], key=found["wire_dtypes"].get) == dtype
    assert found["gradient"] is None
    assert summary["runs"]["optimised"]["losses"][0] == summary["runs"][found["name"]]["losses"][0]


def test_int8_between_two_processes(tmp_path):
    options = ["--virtual-devices", "4", "--topology", "2*cpu:4@200Mbit", "--out", str(tmp_path)]
    options += ["--codec", "int8@host"]
    processes.run_distributed(train_lm.__file__, *SMALL, *options)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["checks"] == dict.fromkeys(summary["checks"], True)
    assert set(summary["compressed"]["wire_dtypes"]) == {"s8", "f32"}


def test_the_default_demo_has_two_runs(tmp_path):
    code, summary = run_example(tmp_path)
    assert code == 0
    assert list(summary["runs"]) == ["plain", "optimised"]
    assert "compressed" not in summary and "compression" not in summary["settings"]


def test_residuals_are_of_each_device():
    job = lm_job.Job(Config(seq_len=16, dim=32, layers=1), optax.adamw(1e-3), make_mesh(HOSTS))
    chosen = lm_codecs.parse_compressor("error_feedback:int4@host")
    optimizer, _ = chosen.apply(job.optimizer, xcoll.Policy(), job.mesh)
    job = lm_job.Job(job.config, optimizer, job.mesh, syncs=True)
    params, state = lm_job.initial_state(job, seed=0)
    tokens = np.random.default_rng(0).integers(0, 256, (8, 17)).astype(np.int32)
    step = jax.jit(train_lm.make_step(job))
    _, state, _ = step(params, state, lm_data.place(tokens, job.mesh))
    (bucket,) = state[0].buckets
    residual = bucket.contributed.value
    assert residual.sharding.is_equivalent_to(NamedSharding(job.mesh, P(("host", "device"))), 2)
    rows = np.asarray(residual)
    assert rows.shape[0] == 8
    assert len({row.tobytes() for row in rows}) == 8


def own_gradients(*values: float) -> list[np.ndarray]:
    """One leaf of gradients, a row for each device."""
    return [np.array([[value, value / 2] for value in values], np.float32)]


def report_with(max_error: float) -> xcoll.Report:
    plan = type("Plan", (), {"max_error": max_error})
    site = type("Site", (), {"plan": plan})
    return type("Report", (), {"sites": (site,)})


def test_the_bound_is_the_mean_over_devices_of_their_largest_gradient():
    own = own_gradients(1.0, 3.0)
    mean = [own[0].mean(0)]
    off = [mean[0] + np.array([0.25, 0.0], np.float32)]
    found = lm_compressed.gradient_error((mean, own), off, report_with(0.125), roundings=1)
    assert found["max_difference"] == 0.25
    # 0.125 times (1 + 3) over two devices, and 1 %.
    assert found["bound_there"] == pytest.approx(0.25, rel=0.011)
    assert found["bound_there"] > 0.25
    assert found["max_ratio"] == pytest.approx(1, rel=0.011)


@pytest.mark.parametrize("where", ["mean", "own", "averaged"])
def test_gradients_that_are_not_finite_are_within_no_bound(where):
    own = own_gradients(1.0, 3.0)
    trees = {"mean": [own[0].mean(0)], "own": own, "averaged": [own[0].mean(0)]}
    trees[where][0].flat[1] = math.inf
    found = lm_compressed.gradient_error(
        (trees["mean"], trees["own"]), trees["averaged"], report_with(0.125), roundings=1
    )
    assert not found["max_ratio"] <= 1.0


def test_bytes_are_told_apart_by_dtype_and_axis():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("host", "device"))

    def step(x, y, z):
        return jax.lax.psum(x, "host"), jax.lax.psum(y, "host"), jax.lax.psum(z, "device")

    program = (
        jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))
        .lower(jnp.ones(64, "float32"), jnp.ones(64, "int8"), jnp.ones(64, "float32"))
        .compile()
    )
    # An all-reduce over two sends each byte once, on each of eight devices; over four, 3/2 times.
    assert lm_runs.wire_dtypes(program, mesh, "host") == {"f32": 8 * 256, "s8": 8 * 64}
    assert lm_runs.wire_dtypes(program, mesh, "device") == {"f32": 8 * 256 * 3 // 2}


def test_the_third_table_fits_80_columns():
    sent = {"host": 12_345_678, "device": 2_345_678_901}
    runs = [
        lm_runs.Run(
            name=name, losses=[6.5, 2.5], held_out=2.6, tokens_per_s=12_345_678.0, compile_s=123.4,
            busiest=sent, total=sent, collectives={"collective-permute": 1234},
            dtypes={"host": {"f32": 1, "s8": 2}},
        )
        for name in ("optimised", "error_feedback:float8_e4m3fn@host")
    ]  # fmt: skip
    further = lm_compressed.compare(
        *runs,
        compression=lm_codecs.parse_compressor("error_feedback:int8@host"),
        exact_predicted=sent,
        report=xcoll.Report(sites=()),
        gradient=None,
        mesh=make_mesh(HOSTS),
        is_expected=True,
        max_ratio=0.27,
    )
    shown = io.StringIO()
    Console(file=shown, width=80).print(further.table)
    assert "…" not in shown.getvalue() and "2,345,678,901" in shown.getvalue()
    assert further.checks["bytes_over_host_at_most_0.27"] is False
    assert further.checks["compressed_bytes_as_predicted"] is False
    assert further.checks["codec_on_the_wire"] is True


BAD = {
    "an unknown codec": (("--codec", "int9"), "'int8'"),
    "an unknown codec on an axis": (("--codec", "int9@host"), "'bfloat16'"),
    "a codec on no axis": (("--codec", "int8@"), "no axis"),
    "a compressor as codec": (("--codec", "top_k:0.1"), "--compressor top_k:0.1"),
    "an unknown compressor": (("--compressor", "top-k"), "'top_k'"),
    "a codec as compressor": (("--compressor", "int8"), "--codec int8"),
    "a fraction outside": (("--compressor", "top_k:2"), "(0, 1]"),
    "a fraction that is none": (("--compressor", "random_k:few"), "random_k:0.01"),
    "a rank that is none": (("--compressor", "powersgd:0"), "positive"),
    "a rank that is no number": (("--compressor", "powersgd:x"), "powersgd:4"),
    "signs of no block": (("--compressor", "sign:12"), "multiple of 8"),
    "feedback of an unknown codec": (("--compressor", "error_feedback:int9"), "'int4'"),
    "an empty argument": (("--compressor", "top_k:"), "top_k:0.01"),
    "an axis that is not there": (
        ("--mesh", "host=2,device=4", "--codec", "int8@hots"),
        "Did you mean 'host'",
    ),
    "a compressor's axis that is not there": (
        ("--mesh", "host=2,device=4", "--compressor", "sign@dcn"),
        "'device'",
    ),
    "both": (("--codec", "int8", "--compressor", "sign"), "--error-feedback"),
    "feedback of nothing": (("--error-feedback",), "--codec"),
    "feedback twice": (("--error-feedback", "--compressor", "sign"), "by themselves"),
    "a ratio of nothing": (("--max-ratio", "0.27"), "--codec"),
    "a ratio that is none": (("--codec", "int8", "--max-ratio", "-1"), "above 0"),
    "a compressor of shards": (("--fsdp", "--compressor", "sign"), "--codec"),
    "feedback on shards": (("--fsdp", "--codec", "int8", "--error-feedback"), "--fsdp"),
}


@pytest.mark.parametrize(("options", "named"), BAD.values(), ids=BAD)
def test_what_cannot_be_is_refused_in_one_line(options, named, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(lm_runs, "train", lambda *args, **kwargs: pytest.fail("trained"))
    with pytest.raises(SystemExit) as exit_:
        train_lm.main([*SMALL, "--out", str(tmp_path), *options])
    assert exit_.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert ": error: " in line and named in line
    assert any(option in line for option in options)


@pytest.mark.parametrize("name", codecs.CODECS)
def test_every_named_codec_can_be_asked_for(name):
    args = lm_options.arguments(["--codec", f"{name}@host"], "")
    assert args.compression.codec == codecs.named(name)
    assert args.compression.axis == "host"
    assert args.compression.wire_dtype in ("s8", "u16")
    with_feedback = lm_options.arguments(["--codec", name, "--error-feedback"], "").compression
    assert with_feedback.compressor == gradients.error_feedback(codecs.named(name))
    assert with_feedback.axis is None
    assert lm_codecs.parse_compressor(f"error_feedback:{name}").compressor == (
        with_feedback.compressor
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("top_k:0.1", gradients.top_k(0.1)),
        ("top_k", gradients.top_k(0.01)),
        ("random_k:0.5@host", gradients.random_k(0.5)),
        ("powersgd:2", gradients.powersgd(2)),
        ("sign", gradients.sign()),
        ("sign:64", gradients.sign(block=64)),
        ("error_feedback", gradients.error_feedback(codecs.int8())),
    ],
)
def test_compressors_by_name(text, expected):
    assert lm_codecs.parse_compressor(text).compressor == expected
