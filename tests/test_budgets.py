"""Budgets: how they are read, what breaks them, and who is blamed."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from audits import audit, row

from xcoll.hlo.budget_checks import assert_budget, breaches
from xcoll.hlo.budgets import Budget, Limit, read_budget

TOML = """
[wire_bytes]
data = "64MiB"
model = 1048576
[count]
all-gather = 4
total = 10
[time]
exposed = "3ms"
share = 0.2
[memory]
total = "80GiB"
temporaries = 0
"""


def test_a_file(tmp_path):
    path = tmp_path / "budget.toml"
    path.write_text(TOML)
    read = read_budget(path)
    assert read.name == "budget.toml"
    assert [(limit.name, limit.allowed) for limit in read.limits] == [
        ("wire_bytes.data", 64 * 2**20),
        ("wire_bytes.model", 2**20),
        ("count.all-gather", 4),
        ("count.total", 10),
        ("time.exposed", 3 * 10**9),  # picoseconds
        ("time.share", 0.2),
        ("memory.total", 80 * 2**30),
        ("memory.temporaries", 0),
    ]
    assert read_budget(str(path)) == read
    assert read_budget(read) is read


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        ({}, "nothing is limited; tables: wire_bytes, count, time, memory"),
        ({"count": {}}, "nothing is limited"),
        ({"counts": {"total": 1}}, "unknown table 'counts'.*Did you mean 'count'"),
        ({"count": 3}, "count = 3: a table is expected"),
        ({"count": {"all-gathers": 1}}, r"\[count\]: unknown key 'all-gathers'.*'all-gather'\?"),
        ({"time": {"exposde": "1ms"}}, r"\[time\]: unknown key 'exposde'.*'exposed'\?"),
        ({"memory": {"temporary": 1}}, r"\[memory\]: unknown key 'temporary'.*'temporaries'\?"),
        ({"count": {"total": True}}, "True: a number of operations"),
        ({"count": {"total": -1}}, "-1: a number of operations"),
        ({"count": {"total": 1.5}}, "1.5: a number of operations"),
        ({"count": {"total": "4"}}, "'4': a number of operations"),
        ({"wire_bytes": {"data": True}}, "True: bytes are expected"),
        ({"wire_bytes": {"data": -1}}, "-1: bytes are expected"),
        ({"wire_bytes": {"data": 1.5}}, "1.5: bytes are expected"),
        ({"wire_bytes": {"data": "-4KiB"}}, "-4KiB: no number of bytes"),
        ({"memory": {"total": "80 gigs"}}, "80 gigs: no number of bytes"),
        ({"memory": {"total": "2097152GiB"}}, "too large; write at most 1048576GiB"),
        ({"time": {"exposed": 3}}, "3: a time with its unit is expected, such as '3ms'"),
        ({"time": {"exposed": "3"}}, "3: no time; write it as 3ms"),
        ({"time": {"exposed": "-3ms"}}, "no time"),
        ({"time": {"exposed": "nan s"}}, "no time"),
        ({"time": {"exposed": "1000001s"}}, "too large; write at most 1000000 s"),
        ({"time": {"exposed": "9" * 5000 + "s"}}, "too large"),
        ({"time": {"share": float("nan")}}, "nan: a fraction of the step"),
        ({"time": {"share": 1.01}}, "from 0 to 1"),
        ({"time": {"share": -0.1}}, "from 0 to 1"),
        ({"time": {"share": True}}, "from 0 to 1"),
        ({"time": {"share": "20%"}}, "from 0 to 1"),
    ],
)
def test_what_is_no_budget(tables, says):
    with pytest.raises(ValueError, match=says):
        read_budget(tables)


@pytest.mark.parametrize(
    "text", [b"[count", b"[count]\ntotal = 1\ntotal = 2", b"\xff", b"a=" + b"[" * 9999]
)
def test_what_is_no_toml(tmp_path, text):
    path = tmp_path / "b.toml"
    path.write_bytes(text)
    with pytest.raises(ValueError, match=r"b\.toml: no TOML"):
        read_budget(path)


def test_what_is_no_source(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_budget(tmp_path / "none.toml")
    with pytest.raises(TypeError, match="budget=3: must be the path"):
        read_budget(3)


def held(audited, tables):
    return [str(breach) for breach in breaches(audited, read_budget(tables))]


# Of 3 us exposed and 6 us of computation a third of the step is exposed. Memory:
# 4096 + 2048 - 1024 + 512 + 128 = 5760.
AT_THE_LIMIT = [
    {"wire_bytes": {"data": 1536, "model": 0}},
    {"count": {"all-reduce": 1, "total": 1, "all-gather": 0}},
    {"time": {"exposed": "3us", "share": 0.3334}},
    {"memory": {"total": 5760, "arguments": 4096, "outputs": 2048, "temporaries": 512}},
]


@pytest.mark.parametrize("tables", AT_THE_LIMIT)
def test_as_much_as_allowed_is_kept(tables):
    assert held(audit(row("psum.1")), tables) == []


@pytest.mark.parametrize(
    ("tables", "lines"),
    [
        (
            {"wire_bytes": {"data": 1535}},
            [
                "wire_bytes.data: 1.5 KiB measured, 1.499 KiB allowed",
                "    1.5 KiB (100%): step.py:7 all-reduce, made by user",
            ],
        ),
        (
            {"count": {"total": 0}},
            [
                "count.total: 1 measured, 0 allowed",
                "    1 (100%): step.py:7 all-reduce, made by user",
            ],
        ),
        (
            {"time": {"exposed": "2.999us"}},
            [
                "time.exposed: 3000000 ps measured, 2999000 ps allowed",
                "    3 µs (100%): step.py:7 all-reduce, made by user",
            ],
        ),
        (
            {"time": {"share": 0.25}},
            [
                "time.share: 33.3% measured, 25.0% allowed",
                "    3 µs (100%): step.py:7 all-reduce, made by user",
            ],
        ),
        (
            {"memory": {"total": 1000}},
            [
                "memory.total: 5.625 KiB measured, 1000 B allowed",
                "    4 KiB (71%): arguments",
                "    1 KiB (18%): outputs that are not written over arguments",
                "    512 B (9%): temporaries",
                "    128 B (2%): code",
            ],
        ),
        ({"memory": {"code": 127}}, ["memory.code: 128 B measured, 127 B allowed"]),
    ],
)
def test_one_more_breaks_it(tables, lines):
    (breach,) = held(audit(row("psum.1")), tables)
    assert breach.splitlines() == lines


def test_amounts_that_read_the_same_are_shown_exactly():
    (breach,) = held(audit(wire_bytes={"data": 2**26 + 1}), {"wire_bytes": {"data": "64MiB"}})
    assert breach == "wire_bytes.data: 67108865 B measured, 67108864 B allowed"
    # 3 us of 9.0009 us, to be 0.33330 of the step.
    (breach,) = held(audit(row("a"), compute_s=6.0009e-6), {"time": {"share": 0.333}})
    assert breach.splitlines()[0].startswith("time.share: 0.3333")


def test_sites_are_blamed_by_what_they_add():
    audited = audit(
        row("a", executions=2),  # 2 x 1536 = 3072
        row("b", source="model.py:3", made_by="partitioner", wire_bytes={"data": 9216}),
        row("c", executions=0, source="never.py:1"),
        row("d", source=None, wire_bytes={"data": 1024}),
        row("e", source=None, op_name="", wire_bytes={"data": 1024}, made_by="unknown"),
        row("f", source="near.py:1", is_near=True, wire_bytes={"data": 1024}),
        row("g", executions=2, source="step.py:7"),  # joins a: 6144 together
        wire_bytes={"data": 18432},  # 6144 + 9216 + 3 x 1024
    )
    (breach,) = held(audited, {"wire_bytes": {"data": "1KiB"}})
    assert breach.splitlines() == [
        "wire_bytes.data: 18 KiB measured, 1 KiB allowed",
        "    9 KiB (50%): model.py:3 all-reduce, made by partitioner",
        "    6 KiB (33%): step.py:7 all-reduce, made by user",
        "    1 KiB (6%): jit(step)/psum all-reduce, made by user",
        "    1 KiB (6%): e all-reduce",
        "    1 KiB (6%): near near.py:1 all-reduce, made by user",
    ]


def test_files_below_the_current_directory_are_named_from_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    audited = audit(
        row("a", source=f"{tmp_path}/models/mlp.py:3"), row("b", source=f"{tmp_path}2/mlp.py:3")
    )
    (breach,) = held(audited, {"count": {"total": 0}})
    assert breach.splitlines()[1:] == [
        "    1 (50%): models/mlp.py:3 all-reduce, made by user",
        f"    1 (50%): {tmp_path}2/mlp.py:3 all-reduce, made by user",
    ]


def test_the_first_five_sites_and_how_many_more():
    rows = [row(f"r{i}", source=f"step.py:{i}") for i in range(7)]
    (breach,) = held(audit(*rows), {"count": {"all-reduce": 6}})
    assert breach.splitlines()[0] == "count.all-reduce: 7 measured, 6 allowed"
    assert breach.splitlines()[-1] == "    and 2 more"
    assert len(breach.splitlines()) == 7


LOOP = dict(executions=None)
UNREAD = dict(
    axes=None, wire_bytes={}, time_s=None, bound_s=None, hidden_s=None, exposed_s=None,
    unread="its groups were not read",
)  # fmt: skip
UNPRICED = dict(time_s=None, bound_s=None, hidden_s=None, exposed_s=None)


@pytest.mark.parametrize(
    ("changes", "tables", "says"),
    [
        (LOOP, {"wire_bytes": {"data": "1MiB"}}, "unknown trip count; 1.5 KiB without"),
        (LOOP, {"time": {"exposed": "1s"}}, "unknown trip count; 3 µs without"),
        (LOOP, {"time": {"share": 1}}, "unknown trip count; 33.3% without"),
        (UNREAD, {"wire_bytes": {"model": "1MiB"}}, "its groups were not read; 0 B without"),
        (UNREAD, {"time": {"exposed": "1s"}}, "its groups were not read; 1 s allowed"),
        (UNPRICED, {"time": {"exposed": "1s"}}, "its time is not predicted; 1 s allowed"),
        (UNPRICED, {"time": {"share": 1}}, "its time is not predicted; 100.0% allowed"),
        ({"kind": "mystery"}, {"count": {"all-gather": 5}}, "operation mystery; 0 without"),
    ],
)
def test_what_cannot_be_shown_is_broken(changes, tables, says):
    (breach,) = held(audit(row("psum.1", **changes)), tables)
    head, first, *_ = breach.splitlines()
    assert "cannot be shown to hold: 1 collective: " in head and says in head
    assert "step.py:7" in first, "the site that is not known comes first"


def test_what_is_not_known_and_more_than_allowed():
    audited = audit(row("a", executions=None), row("b", executions=None))
    (breach,) = held(audited, {"wire_bytes": {"data": "1KiB"}})
    assert breach.startswith("wire_bytes.data: at least 1.5 KiB measured, 1 KiB allowed; 2 coll")


@pytest.mark.parametrize(
    ("changes", "tables"),
    [
        (LOOP, {"wire_bytes": {"model": 0}}),  # it sends nothing over model, however often
        (LOOP, {"count": {"total": 1}}),  # operations, not executions
        (UNREAD, {"count": {"all-reduce": 1}}),
        (UNPRICED, {"wire_bytes": {"data": 1536}}),
        (UNPRICED | {"executions": 0}, {"time": {"exposed": "0s"}}),
        (LOOP | {"hidden_s": 4e-6, "exposed_s": 0.0}, {"time": {"exposed": "0s"}}),
    ],
)
def test_what_is_known_all_the_same(changes, tables):
    assert held(audit(row("psum.1", **changes)), tables) == []


def test_figures_that_are_missing():
    (breach,) = held(audit(memory=None), {"memory": {"total": "1GiB"}})
    assert "XLA does not say how much memory the program uses; 1 GiB allowed" in breach
    (breach,) = held(audit(compute_s=None), {"time": {"share": 1}})
    assert "how long a device computes is not known" in breach
    assert held(audit(compute_s=None), {"time": {"exposed": "0s"}}) == []
    assert held(audit(compute_s=0.0), {"time": {"share": 0}}) == [], "an empty step waits for none"


def test_code_of_unknown_size():
    # Every program has some: where the compiler says 0, it does not say (GPU).
    unsaid = dataclasses.replace(audit().memory, code=0)
    (breach,) = held(audit(memory=unsaid), {"memory": {"code": "1GiB"}})
    assert breach.startswith("memory.code: cannot be shown to hold: the compiler does not say")


def test_what_goes_between_slices_counts_as_what_it_carries_out():
    rows = [
        row("send.1", kind="send", transfer="all-gather"),
        row("recv.1", kind="recv", transfer="all-gather"),
        row("all-gather.1", kind="all-gather"),
    ]
    kept = {"count": {"all-gather": 2, "send": 1, "recv": 1, "total": 3, "all-reduce": 0}}
    assert held(audit(*rows), kept) == []
    (breach,) = held(audit(rows[0], rows[1]), {"count": {"all-gather": 0}})
    head, blamed = breach.splitlines()
    assert head == "count.all-gather: 1 measured, 0 allowed"
    assert "1 (100%)" in blamed and "send (all-gather)" in blamed


def test_an_axis_that_the_mesh_lacks():
    with pytest.raises(ValueError, match=r"unknown axis 'dta'.*Did you mean 'data'"):
        breaches(audit(), read_budget({"wire_bytes": {"dta": 0}}))


def test_assert_budget():
    audited = audit(row("psum.1"))
    assert assert_budget(audited, budget={"count": {"total": 1}}) is audited
    budget = Budget(limits=(Limit(table="count", key="total", allowed=0),), name="mine")
    with pytest.raises(AssertionError) as caught:
        assert_budget(audited, budget=budget)
    assert str(caught.value).splitlines() == [
        "mine is broken",
        "count.total: 1 measured, 0 allowed",
        "    1 (100%): step.py:7 all-reduce, made by user",
    ]
    with pytest.raises(TypeError, match="takes only budget= beside an Audit"):
        assert_budget(audited, 1, budget=budget)


def test_assert_budget_compiles_a_function():
    mesh = jax.sharding.Mesh(jax.devices()[:8], ("data",))
    spec = jax.P("data")
    step = jax.shard_map(
        lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=spec, out_specs=jax.P()
    )
    x = jax.ShapeDtypeStruct((64, 128), jnp.float32)
    # Each of 8 ranks sums f32[8, 128]: 4096 bytes, of which a ring sends 2 x 7 / 8 = 7168.
    budget = {"wire_bytes": {"data": 7168}, "count": {"all-reduce": 1, "total": 1}}
    audited = assert_budget(step, x, budget=budget, mesh=mesh)
    assert audited.wire_bytes == {"data": 7168}
    with pytest.raises(AssertionError, match=r"6.999 KiB allowed\n.*test_budgets.py:"):
        assert_budget(step, x, budget={"wire_bytes": {"data": 7167}}, mesh=mesh, topology="cpu:8")
