"""Comparing two audits: totals, and rows that appeared, vanished or changed."""

import json

import pytest
from audits import audit, row

from xcoll.hlo.comparing import compare
from xcoll.memory import Memory


def changes(before, after):
    """What changed, of two lists of rows: ``(what, source, number before, number after)``."""
    found = compare(audit(*before), audit(*after)).sites
    return [
        (s.what, s.source, s.before and s.before.number, s.after and s.after.number) for s in found
    ]


def test_the_same_program():
    audited = audit(row("a"), row("b", source="model.py:3"))
    compared = compare(audited, audited)
    assert compared.notes == ()
    assert {total.difference for total in compared.totals} == {0}
    assert [site.what for site in compared.sites] == ["same", "same"]
    assert "2 sites with the same collectives" in str(compared)
    assert "model.py" not in str(compared), "what is the same is not listed"


def test_totals():
    gather = row("g", "all-gather", wire_bytes={"data": 4096}, exposed_s=5e-6, time_s=6e-6)
    before = audit(row("a"))
    after = audit(
        row("a"),
        gather,
        wire_bytes={"data": 5632, "model": 0},  # 1536 + 4096
        memory=Memory(arguments=4096, outputs=2048, aliased=0, temporaries=512, code=128),
    )
    found = {(t.table, t.key): (t.before, t.after) for t in compare(before, after).totals}
    times = {key: value for key, value in found.items() if key[0] == "time"}
    assert {key: value for key, value in found.items() if key[0] != "time"} == {
        ("wire_bytes", "data"): (1536, 5632),
        ("wire_bytes", "model"): (0, 0),
        ("count", "all-reduce"): (1, 1),
        ("count", "all-gather"): (0, 1),
        ("memory", "arguments"): (4096, 4096),
        ("memory", "outputs"): (2048, 2048),
        ("memory", "aliased"): (1024, 0),
        ("memory", "temporaries"): (512, 512),
        ("memory", "code"): (128, 128),
        ("memory", "total"): (5760, 6784),
    }
    # 4 us, then 4 + 6; 3 us exposed, then 3 + 5; a step of 6 + 3 us, then 6 + 8.
    assert times == {
        ("time", "communication"): pytest.approx((4e-6, 10e-6)),
        ("time", "exposed"): pytest.approx((3e-6, 8e-6)),
        ("time", "compute"): pytest.approx((6e-6, 6e-6)),
        ("time", "step"): pytest.approx((9e-6, 14e-6)),
    }
    text = str(compare(before, after))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "sent over data 1.5 KiB 5.5 KiB +4 KiB (+266.7%)" in lines
    assert "all-gather 0 1 +1" in lines
    assert "all-reduce 1 1 same" in lines
    assert "exposed time 3 µs 8 µs +5 µs (+166.7%)" in lines
    assert "memory, aliased 1 KiB 0 B -1 KiB (-100.0%)" in lines
    assert not any("over model" in line for line in lines), "of what is nothing, nothing is said"


def test_appeared_vanished_changed():
    a, b = row("a"), row("b", source="b.py:1", op_name="jit(b)")
    longer = row("a2", num_bytes=2048, executions=3)
    assert changes([a, b], [a]) == [("same", "step.py:7", 1, 1), ("vanished", "b.py:1", 1, None)]
    assert changes([a], [b, a]) == [("appeared", "b.py:1", None, 1), ("same", "step.py:7", 1, 1)]
    assert changes([a], [longer]) == [("changed", "step.py:7", 1, 1)]
    assert changes([a], [a, row("a3")]) == [("changed", "step.py:7", 1, 2)]
    assert changes([], []) == []


@pytest.mark.parametrize("change", [{"kind": "all-gather"}, {"axes": ("model",)}, {"axes": None}])
def test_another_kind_or_axis_is_another_collective(change):
    found = changes([row("a")], [row(**{"name": "a"} | change)])
    assert [what for what, *_ in found] == ["appeared", "vanished"]


def test_another_dtype_is_another_collective():
    found = changes([row("a")], [row("a", dtypes=("bf16",))])
    assert [what for what, *_ in found] == ["appeared", "vanished"]


def test_an_edit_moves_lines():
    # Two lines were put above both: by their lines alone, q would be taken for p.
    p, q = row("a", source="s.py:5", op_name="p"), row("b", source="s.py:7", op_name="q")
    moved = [row("a", source="s.py:7", op_name="p"), row("b", source="s.py:9", op_name="q")]
    assert changes([p, q], moved) == [("same", "s.py:7", 1, 1), ("same", "s.py:9", 1, 1)]


def test_a_scope_with_another_name_on_the_same_line():
    assert changes([row("a", op_name="old/psum")], [row("a", op_name="new/psum")]) == [
        ("same", "step.py:7", 1, 1)
    ]


def test_what_one_line_does_twice_is_told_apart_by_name():
    # Forwards and backwards, say.
    def both(sent):
        return [row(n, source="s.py:5", op_name=n, wire_bytes={"data": sent}) for n in ("fw", "bw")]

    once = row("c", source="s.py:9", op_name="alone", wire_bytes={"data": 4})
    found = str(compare(audit(*both(1)), audit(*both(2), once)))
    assert [name in found for name in ("fw", "bw", "alone")] == [True, True, False]


def test_rows_without_line_and_name_are_matched_with_each_other():
    nameless = {"source": None, "op_name": ""}
    assert changes([row("a", **nameless)], [row("z", **nameless), row("b")]) == [
        ("same", None, 1, 1),
        ("appeared", "step.py:7", None, 1),
    ]
    # What has one is none of them.
    assert changes([row("a", **nameless)], [row("a", source=None)]) == [
        ("appeared", None, None, 1),
        ("vanished", None, 1, None),
    ]


def test_a_site_s_figures():
    before = [row("a", executions=3), row("b", wire_bytes={"data": 64, "model": 32})]
    after = [row("a", executions=None), row("b", exposed_s=None)]
    (site,) = compare(audit(*before), audit(*after)).sites
    assert (site.before.number, site.before.executions, site.before.num_bytes) == (2, 4, 2048)
    assert site.before.wire_bytes == {"data": 3 * 1536 + 64, "model": 32}
    assert site.before.exposed_s == pytest.approx(4 * 3e-6)
    assert (site.after.executions, site.after.exposed_s) == (None, None)
    text = str(compare(audit(*before), audit(*after)))
    (line,) = [line for line in text.splitlines() if "changed" in line and "all-reduce" in line]
    assert "step.py:7" in line and "12 µs" in text


def test_what_is_hard_to_compare_is_said():
    other = audit(
        row("a", executions=None, unread="not read"),
        axis_sizes={"model": 2, "data": 4},
        topology="h100:8",
        compute_source="roofline",
        wire_bytes={"dta": 5},
    )
    compared = compare(audit(row("a")), other)
    assert compared.notes == (
        "the meshes differ: data=4,model=2, then model=2,data=4; bytes are those of one device",
        "the topologies differ: v5e:2x4, then h100:8; times differ with them",
        "compute times come from optimal_seconds, then from roofline",
        "collectives of the second that could not be read: 1",
        "collectives of the second in loops of unknown length, counted once: 1",
    )
    (gone,) = [total for total in compared.totals if total.key == "dta"]
    assert (gone.before, gone.after, gone.difference) == (None, 5, None)
    for note in compared.notes:
        assert note in str(compared)


def test_topologies_of_one_name():
    cpus, others = "cpu:8\n  data=4", "cpu:8\n  data=8"
    (note,) = compare(audit(topology=cpus), audit(topology=others)).notes
    assert note == "the axes lie on other links of cpu:8; times differ with them"
    # Where the meshes differ, their links do as well.
    other = audit(topology=others, axis_sizes={"data": 8})
    (note,) = compare(audit(topology=cpus), other).notes
    assert note.startswith("the meshes differ: ")


def test_the_same_way_of_timing_with_another_figure_is_no_difference():
    first = audit(compute_source="optimal_seconds of the compiler (1e-06 s)")
    assert compare(first, audit(compute_source="optimal_seconds of it (2e-06 s)")).notes == ()


def test_json():
    data = json.loads(compare(audit(row("a")), audit(row("b", num_bytes=4096))).to_json())
    assert data["notes"] == []
    assert data["totals"][0] == {
        "table": "wire_bytes",
        "key": "data",
        "before": 1536,
        "after": 1536,
        "difference": 0,
    }
    (site,) = data["sites"]
    assert (site["what"], site["kind"], site["axes"]) == ("changed", "all-reduce", ["data"])
    assert (site["before"]["num_bytes"], site["after"]["num_bytes"]) == (1024, 4096)
