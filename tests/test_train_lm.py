"""The example that `make demo` runs."""

import functools
import io
import itertools
import json
import math

import jax
import jax.numpy as jnp
import lm_compare
import lm_data
import lm_job
import lm_runs
import numpy as np
import optax
import pytest
import train_lm
from flax import nnx
from jax.sharding import Mesh
from lm_devices import make_mesh, parse_mesh
from lm_model import Config, Transformer, next_byte_loss
from rich.console import Console

import xcoll
from xcoll import aot, hlo

CONFIG = Config(seq_len=16, dim=32, heads=2, layers=1)
BATCH = 16
HOSTS = {"host": 2, "device": 4}


def make_job(mesh: Mesh, fsdp: bool, config: Config = CONFIG) -> lm_job.Job:
    return lm_job.Job(config, optax.adamw(1e-3), mesh, fsdp)


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
    job = make_job(make_mesh(parse_mesh(mesh)), fsdp)
    probe = train_lm.make_probe(job)
    if optimise:
        probe = xcoll.optimize(probe, policy=xcoll.Policy(algorithm="ring"))
    params, _ = lm_job.initial_state(job, seed=0)
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
    job = make_job(make_mesh(HOSTS), fsdp)
    params, state = lm_job.initial_state(job, seed=0)
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
    job = make_job(make_mesh(HOSTS), fsdp=True)
    params, state = lm_job.initial_state(job, seed=0)
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
    assert optimised["busiest"] == optimised["predicted"]
    if not fsdp:
        # One flat ring over eight: 2 * 7/8 of the payload passes each of the two links between
        # hosts. Nested: each device of eight sends half of its quarter twice. Sums are padded.
        before, after = plain["total"]["host"], optimised["total"]["host"]
        assert before == 2 * plain["busiest"]["host"]
        assert 4 / 7 <= after / before < 0.6
    assert any(site["kept_reason"] is None for site in summary["report"]["sites"])


def test_end_to_end_on_one_device(tmp_path):
    code, summary = run_example(tmp_path, "--mesh", "device=1")
    assert code == 0
    assert summary["runs"]["plain"]["busiest"] == {"device": 0}


def test_a_topology_that_is_not_rewritten_for_fails(tmp_path):
    code, summary = run_example(
        tmp_path, "--mesh", "device=8", "--topology", "cpu:8", "--algorithm", "native"
    )
    assert code == 1
    assert summary["checks"]["gradients_rewritten"] is False


def planned(policy: xcoll.Policy, fsdp: bool = False) -> xcoll.Report:
    job = make_job(make_mesh(HOSTS), fsdp)
    state = lm_job.initial_state(job, seed=0)
    return xcoll.explain(train_lm.make_step(job), *state, tokens(), policy=policy)


def is_scalar(site) -> bool:
    return site.num_bytes <= 4


def is_large(site) -> bool:
    return site.num_bytes > 4


@pytest.mark.parametrize(
    ("policy", "fsdp", "expected"),
    [
        (xcoll.Policy(algorithm="ring", where=is_scalar), False, False),  # the loss alone
        (xcoll.Policy(algorithm={"all_gather": "ring"}), True, False),  # parameters alone
        (xcoll.Policy.native(), False, False),
        (xcoll.Policy(algorithm="ring", where=is_large), False, True),
        (xcoll.Policy(algorithm={"psum_scatter": "ring"}), True, True),
    ],
    ids=["loss", "parameters", "nothing", "psum", "psum_scatter"],
)
def test_only_a_sum_of_gradients_counts_as_rewritten(policy, fsdp, expected):
    report = planned(policy, fsdp)
    assert bool(report.rewritten) == (policy != xcoll.Policy.native())
    assert lm_compare.rewrites_gradients(report) is expected


def gradients() -> list[list[np.ndarray]]:
    """Averaged and per device, of two programs that agree; three leaves each."""
    shares = [np.full((8, 3), value, np.float32) for value in (1.0, 0.25, 2.0)]
    averaged = [share.mean(0) for share in shares]
    return [averaged, shares, [a.copy() for a in averaged], [s.copy() for s in shares]]


def difference_of(plain, plain_shares, optimised, optimised_shares):
    return lm_compare.gradient_difference(
        (plain, plain_shares), (optimised, optimised_shares), roundings=14
    )


def test_gradients_that_differ_by_a_rounding_are_within_the_bound():
    trees = gradients()
    trees[2][1][2] += 2.0**-26  # half a unit in the last place of 0.25
    assert difference_of(*trees) == {"max_difference": 0.0, **difference_of(*gradients())}
    trees[2][1][2] += 2.0**-25
    found = difference_of(*trees)
    assert found["max_difference"] == 2.0**-25
    # 16 roundings of half a unit each, of the mean 0.25.
    assert found["bound_there"] == pytest.approx(16 * 2.0**-24 * 0.25, rel=0.02)
    assert found["max_ratio"] == pytest.approx(1 / 8, rel=0.02)


def test_a_gradient_that_is_off_exceeds_the_bound():
    trees = gradients()
    trees[2][1][2] *= 1.001
    assert difference_of(*trees)["max_ratio"] > 100


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("leaf", range(3))
@pytest.mark.parametrize("tree", range(4))
def test_a_gradient_that_is_not_finite_is_within_no_bound(tree, leaf, value):
    trees = gradients()
    trees[tree][leaf].flat[1] = value
    assert not difference_of(*trees)["max_ratio"] <= 1.0


NOTHING = """HloModule nothing
ENTRY %main (x: f32[]) -> f32[] {
  ROOT %x = f32[] parameter(0)
}"""


class FakeStep:
    """Stands for a jitted step: its state counts its own steps, and it writes down its calls."""

    def __init__(self, name: str, calls: list):
        self.name, self.calls = name, calls

    def lower(self, *args):
        return self

    def compile(self):
        return self

    def as_text(self):
        return NOTHING

    def __call__(self, params, opt_state, tokens):
        self.calls.append((self.name, int(tokens[0, 0])))
        return params + 1, opt_state, 10.0 * params


def test_runs_take_turns_over_the_same_batches_each_with_its_own_state():
    calls: list = []
    shown = io.StringIO()
    plain, optimised = lm_runs.train(
        {name: FakeStep(name, calls) for name in ("plain", "optimised")},
        lambda name: (0, None),
        (np.full((2, 5), index) for index in itertools.count()),
        num_steps=6,
        held_out=float,
        mesh=make_mesh({"device": 1}),
        console=Console(file=shown, width=80),
    )
    assert lm_runs.BLOCK == 4
    first, last = range(4), range(4, 6)
    assert calls == [
        (name, index)
        for name, block in (
            ("plain", first), ("optimised", first), ("optimised", last), ("plain", last),
        )
        for index in block
    ]  # fmt: skip
    for run in (plain, optimised):
        assert run.losses == [0, 10, 20, 30, 40, 50]
        assert run.held_out == 6
    assert "plain" in shown.getvalue() and "optimised" in shown.getvalue()


def test_speed_is_that_of_the_median_step_after_the_first():
    training = lm_runs._Training("plain", FakeStep("plain", []), (0, None), np.zeros((2, 5)))
    training.times = [100.0, 1.0, 2.0, 90.0]
    assert training.tokens_per_s == 8 / 2.0


def test_the_table_shows_every_figure_whole_on_80_columns():
    sent = {"host": 12_345_678_901, "device": 2_345_678_901}
    runs = [
        lm_runs.Run(
            name=name, losses=[6.5, 2.5], held_out=2.6, tokens_per_s=12_345_678.0, compile_s=123.4,
            busiest=sent, total=sent, collectives={"collective-permute": 1234},
        )
        for name in ("plain", "optimised")
    ]  # fmt: skip
    gradient = {"max_difference": 1e-8, "bound_there": 1e-7, "max_ratio": 0.1}
    text = io.StringIO()
    Console(file=text, width=80).print(lm_compare.table(*runs, (sent, sent), gradient))
    lines = text.getvalue().splitlines()
    assert not any("…" in line for line in lines)
    assert text.getvalue().count("12,345,678,901") == 2 * 3
    rows = [line for line in lines if line.startswith("│")]
    labels = [row.strip("│").split("│")[0].strip() for row in rows]
    assert labels.count("busiest device, counted") == labels.count("whole link, counted") == 2
    assert all(labels)


BAD = {
    "an axis twice": ("--mesh", "host=2,host=4"),
    "an axis without a size": ("--mesh", "host"),
    "a negative size": ("--mesh", "host=-2,device=-4"),
    "a size of nothing": ("--mesh", "device=0"),
    "an axis without a name": ("--mesh", "=8"),
    "no axis": ("--mesh", ""),
    "more devices than there are": ("--mesh", "device=16"),
    "no process": ("--distributed", "abc"),
    "no port": ("--distributed", "10.0.0.1,2,0"),
    "a process too many": ("--distributed", "10.0.0.1:1234,2,2"),
    "no steps": ("--steps", "0"),
    "no batch": ("--batch", "0"),
    "a batch that does not divide": ("--mesh", "device=8", "--batch", "12"),
    "no devices": ("--virtual-devices", "0"),
    "a rate that is no number": ("--lr", "nan"),
    "a rate without end": ("--lr", "inf"),
    "a negative rate": ("--lr", "-1"),
    "a negative seed": ("--seed", "-1"),
    "a width the heads do not divide": ("--dim", "66"),
    "no layers": ("--layers", "0"),
    "a sequence longer than the text": ("--seq-len", "1000000000"),
    "an unknown algorithm": ("--algorithm", "nonsense"),
    "a malformed topology": ("--topology", "2*cpu:4@200Mbi"),
    "an unknown topology": ("--topology", "nonsense"),
    "another topology": ("--mesh", "device=4", "--topology", "2*cpu:4@200Mbit"),
    "an unknown option": ("--nonsense",),
    "quick in one process": ("--quick",),
    "figures of variants in one process": ("--json",),
    "variants of one step": ("--distributed", "--quick", "--fsdp"),
    "a target that is no loss": ("--distributed", "--target-loss", "-3"),
}


@pytest.fixture
def untrained(monkeypatch):
    """Stops where the training would start."""

    def train(*args, **kwargs):
        raise AssertionError("trained")

    monkeypatch.setattr(lm_runs, "train", train)


@pytest.mark.parametrize("options", BAD.values(), ids=BAD)
def test_a_command_line_that_cannot_be_is_refused_in_one_line(options, tmp_path, capsys, untrained):
    with pytest.raises(SystemExit) as exit_:
        train_lm.main(["--out", str(tmp_path), *options])
    assert exit_.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert ": error: " in line
    # It names the option, and the value where there is one.
    assert options[-2 if len(options) > 1 else 0] in line
    assert options[-1] in line or options[-1] == ""


def test_out_that_cannot_be_made_is_refused_before_the_training(tmp_path, capsys, untrained):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as exit_:
        train_lm.main([*SMALL, "--mesh", "device=1", "--out", str(tmp_path / "file" / "out")])
    assert exit_.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path / "file" / "out") in line


def test_out_is_made_before_the_training(tmp_path, untrained):
    with pytest.raises(AssertionError, match="trained"):
        train_lm.main([*SMALL, "--mesh", "device=1", "--out", str(tmp_path / "new" / "out")])
    assert (tmp_path / "new" / "out").is_dir()


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
