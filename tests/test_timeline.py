"""Timelines: events of schedules written by hand, against times added up on paper."""

import itertools
import json
import os

import jax
import pytest
from jax import lax

from xcoll import aot
from xcoll.hlo.auditing import audit
from xcoll.hlo.reader import collectives_of
from xcoll.hlo.result import Audit
from xcoll.hlo.rows import Event, Row
from xcoll.hlo.spans import spans
from xcoll.hlo.text import parse
from xcoll.hlo.timeline import events_of, write_timeline

MS = 1e-3


def events_in(text, rows, times):
    """The events of a program's text."""
    module = parse(text)
    return events_of(module, rows, spans(module, collectives_of(module)), times)


class Times:
    """Milliseconds of instructions by name; 0 where not said."""

    def __init__(self, **milliseconds):
        self.milliseconds = milliseconds

    def instruction_s(self, computation, name):
        return self.milliseconds.get(name.replace(".", "_"), 0) * MS


def row(name, time_ms, hidden_ms=0, *, computation="main", executions=1, **fields):
    given = {
        "kind": "all-reduce",
        "axes": ("data",),
        "level_bytes": {"x": 8},
        "transfer": None,
        "conditional": False,
        **fields,
    }
    return Row(
        name=name,
        dtypes=("f32",),
        num_bytes=8,
        operands=(("f32", (2,)),),
        num_ranks=4,
        executions=executions,
        wire_bytes={"data": 12},
        time_s=time_ms * MS,
        bound_s=0.0,
        is_async=hidden_ms > 0,
        hidden_s=hidden_ms * MS,
        exposed_s=(time_ms - hidden_ms) * MS,
        source="step.py:7",
        is_near=False,
        made_by="user",
        computation=computation,
        op_name="jit(f)/psum",
        unread="",
        **given,
    )


def audit_of(rows, events, compute_ms):
    return Audit(
        rows=tuple(rows),
        axis_sizes={"data": 4},
        topology="4 devices\nsecond line",
        wire_bytes={},
        level_bytes={},
        compute_s=compute_ms * MS,
        compute_source="by hand",
        memory=None,
        advice=(),
        events=tuple(events),
    )


def in_ms(events):
    """Track, name, start and end of each, in the order of starts, the longest first."""
    found = [
        (e.track, e.name, round(e.start_s / MS, 9), round((e.start_s + e.duration_s) / MS, 9))
        for e in events
    ]
    return sorted(found, key=lambda e: (e[2], -e[3]))


# The reductions of two values: one is awaited at once, the other has 3 ms of computation beside it.
OVERLAPPED = """HloModule f, is_scheduled=true, num_partitions=4
ENTRY %main (x: f32[2]) -> f32[2] {
  %x = f32[2]{0} parameter(0)
  %one = f32[2]{0} negate(%x)
  %two = f32[2]{0} negate(%one)
  %sync = f32[2]{0} all-reduce(%two), replica_groups={}, to_apply=%add
  %start = f32[2]{0} all-reduce-start(%sync), replica_groups={}, to_apply=%add
  %three = f32[2]{0} negate(%sync)
  %four = f32[2]{0} negate(%three)
  %done = f32[2]{0} all-reduce-done(%start)
  ROOT %five = f32[2]{0} add(%four, %done)
}"""
TIMES = Times(one=1, two=2, three=1, four=2, five=4)


def test_computation_is_merged_and_what_is_exposed_is_waited_for():
    rows = [row("sync", 5), row("start", 10, 3)]
    events = events_in(OVERLAPPED, rows, TIMES)
    assert in_ms(events) == [
        ("compute", "two and 1 more", 0, 3),
        ("compute", "waits for sync", 3, 8),
        ("x", "all-reduce", 3, 8),
        ("x", "all-reduce", 8, 18),
        ("compute", "four and 1 more", 8, 11),
        ("compute", "waits for start", 11, 18),
        ("compute", "five", 18, 22),
    ]
    audit = audit_of(rows, events, compute_ms=10)
    assert max(e.start_s + e.duration_s for e in events) == pytest.approx(audit.step_s, rel=1e-12)
    computed = [e.duration_s for e in events if e.track == "compute" and e.row is None]
    assert sum(computed) == pytest.approx(audit.compute_s, rel=1e-12)


def test_a_hidden_collective_is_not_waited_for():
    rows = [row("sync", 5), row("start", 2, 2)]
    events = events_in(OVERLAPPED, rows, TIMES)
    assert ("x", "all-reduce", 8, 10) in in_ms(events)
    assert [e.name for e in events if e.name.startswith("waits")] == ["waits for sync"]
    assert max(e.start_s + e.duration_s for e in events) == pytest.approx(15 * MS, rel=1e-12)


TWO = """HloModule f, is_scheduled=true, num_partitions=4
ENTRY %main (x: f32[2]) -> f32[2] {
  %x = f32[2]{0} parameter(0)
  %long = f32[2]{0} all-reduce-start(%x), replica_groups={}, to_apply=%add
  %short = f32[2]{0} all-reduce-start(%x), replica_groups={}, to_apply=%add
  %one = f32[2]{0} negate(%x)
  %second = f32[2]{0} all-reduce-done(%short)
  %two = f32[2]{0} negate(%x)
  %first = f32[2]{0} all-reduce-done(%long)
  ROOT %three = f32[2]{0} add(%first, %second)
}"""


def test_two_at_once_are_on_two_tracks_and_each_is_waited_for_at_its_done(tmp_path):
    rows = [row("long", 9, 3), row("short", 4, 1)]
    events = events_in(TWO, rows, TIMES)
    assert in_ms(events) == [
        ("x", "all-reduce", 0, 4),
        ("compute", "one", 0, 1),
        ("compute", "waits for short", 1, 4),
        ("x", "all-reduce", 3, 12),  # begun when the other is nearly done: 3 of 9 are hidden
        ("compute", "two", 4, 6),
        ("compute", "waits for long", 6, 12),
        ("compute", "three", 12, 13),
    ]
    path = tmp_path / "out.json"
    write_timeline(audit_of(rows, events, 10), path)
    tracks = names_of(json.loads(path.read_text()))
    assert {"compute", "x", "x (2)"} <= set(tracks.values())


def names_of(trace):
    found = [e for e in trace["traceEvents"] if e["ph"] == "M" and e["name"] == "thread_name"]
    return {e["tid"]: e["args"]["name"] for e in found}


LOOP = """HloModule f, is_scheduled=true, num_partitions=4
%body (s: (s32[], f32[2])) -> (s32[], f32[2]) {
  %s = (s32[], f32[2]{0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %v = f32[2]{0} get-tuple-element(%s), index=1
  %work = f32[2]{0} negate(%v)
  %sum = f32[2]{0} all-reduce(%work), replica_groups={}, to_apply=%add
  ROOT %next = (s32[], f32[2]{0}) tuple(%i, %sum)
}
%cond (t: (s32[], f32[2])) -> pred[] {
  %t = (s32[], f32[2]{0}) parameter(0)
  ROOT %less = pred[] constant(true)
}
ENTRY %main (p: (s32[], f32[2])) -> (s32[], f32[2]) {
  %p = (s32[], f32[2]{0}) parameter(0)
  %before = (s32[], f32[2]{0}) copy(%p)
  %loop = (s32[], f32[2]{0}) while(%before), condition=%cond, body=%body, TRIPS
  ROOT %after = (s32[], f32[2]{0}) copy(%loop)
}"""
TRIPS = 'backend_config={"known_trip_count":{"n":"48"}}'


def test_a_loop_of_48_layers_is_one_iteration_and_one_event_for_the_others():
    rows = [row("sum", 2, computation="body", executions=48)]
    events = events_in(
        LOOP.replace("TRIPS", TRIPS), rows, Times(before=1, work=3, loop=48 * 3, after=4)
    )
    assert in_ms(events) == [
        ("compute", "before", 0, 1),
        ("compute", "work", 1, 4),
        ("compute", "waits for sum", 4, 6),
        ("x", "all-reduce", 4, 6),
        ("loops and branches", "loop: iterations 2..48, alike", 6, 6 + 47 * 5),
        ("compute", "after", 241, 245),
    ]
    # 47 iterations of 3 ms.
    assert events[4].note == "of it 141 ms computation"
    audit = audit_of(rows, events, compute_ms=1 + 48 * 3 + 4)
    assert max(e.start_s + e.duration_s for e in events) == pytest.approx(audit.step_s, rel=1e-12)


def test_of_a_loop_of_unknown_length_one_iteration_is_drawn_and_that_is_said():
    text = LOOP.replace(", TRIPS", "")
    rows = [row("sum", 2, computation="body", executions=None)]
    events = events_in(text, rows, Times(before=1, work=3, loop=3, after=4))
    assert in_ms(events)[-1] == ("compute", "after", 6, 10)
    (loop,) = [e for e in events if e.track == "loops and branches"]
    assert in_ms([loop]) == [("loops and branches", "loop: 1 of ?", 1, 6)]
    assert "not known" in loop.note


BRANCHES = """HloModule f, is_scheduled=true, num_partitions=4
%short (a: f32[2]) -> f32[2] {
  %a = f32[2]{0} parameter(0)
  ROOT %idle = f32[2]{0} negate(%a)
}
%long (b: f32[2]) -> f32[2] {
  %b = f32[2]{0} parameter(0)
  ROOT %sum = f32[2]{0} all-reduce(%b), replica_groups={}, to_apply=%add
}
%longer (c: f32[2]) -> f32[2] {
  %c = f32[2]{0} parameter(0)
  %work = f32[2]{0} negate(%c)
  ROOT %total = f32[2]{0} all-reduce(%work), replica_groups={}, to_apply=%add
}
ENTRY %main (x: f32[2], n: s32[]) -> f32[2] {
  %x = f32[2]{0} parameter(0)
  %n = s32[] parameter(1)
  ROOT %choice = f32[2]{0} conditional(%n, %x, %x, %x), branch_computations={%short, %long, %longer}
}"""


def test_of_a_conditional_the_branch_that_takes_longest_is_drawn():
    rows = [
        row("sum", 2, computation="long", conditional=True),
        row("total", 2, computation="longer", conditional=True),
    ]
    events = events_in(BRANCHES, rows, Times(work=3, choice=3))
    assert in_ms(events) == [
        ("loops and branches", "choice", 0, 5),
        ("compute", "work", 0, 3),
        ("compute", "waits for total", 3, 5),
        ("x", "all-reduce", 3, 5),
    ]
    assert events[0].note == "the branch that takes longest"
    assert events[3].note == "only if its branch is taken"
    # One without collectives is one of them.
    events = events_in(BRANCHES, rows, Times(work=3, idle=6, choice=6))
    assert in_ms(events) == [("compute", "idle", 0, 6), ("loops and branches", "choice", 0, 6)]


BRANCH_IN_LOOP = LOOP.replace(
    "  %sum = f32[2]{0} all-reduce(%work), replica_groups={}, to_apply=%add\n",
    "  %n = s32[] constant(0)\n"
    "  %one = f32[2]{0} conditional(%n, %v, %v), branch_computations={%long, %short}\n"
    "  %sum = f32[2]{0} all-reduce(%one), replica_groups={}, to_apply=%add\n",
).replace(
    "%body",
    """%long (a: f32[2]) -> f32[2] {
  %a = f32[2]{0} parameter(0)
  ROOT %total = f32[2]{0} all-reduce(%a), replica_groups={}, to_apply=%add
}
%short (b: f32[2]) -> f32[2] {
  %b = f32[2]{0} parameter(0)
  ROOT %idle = f32[2]{0} negate(%b)
}
%body""",
    1,
)


def test_a_conditional_in_a_loop_is_in_all_its_iterations():
    rows = [
        row("total", 6, computation="long", conditional=True, executions=3),
        row("sum", 2, computation="body", executions=3),
    ]
    text = BRANCH_IN_LOOP.replace("TRIPS", TRIPS.replace("48", "3"))
    events = events_in(text, rows, Times(before=1, work=3, loop=9, after=4))
    # Each iteration: 3 ms of work, 6 ms of the longer branch, 2 ms of the sum.
    assert in_ms(events) == [
        ("compute", "before", 0, 1),
        ("compute", "work", 1, 4),
        ("compute", "waits for total", 4, 10),
        ("x", "all-reduce", 4, 10),
        ("loops and branches", "one", 4, 10),
        ("compute", "waits for sum", 10, 12),
        ("x", "all-reduce", 10, 12),
        ("loops and branches", "loop: iterations 2..3, alike", 12, 34),
        ("compute", "after", 34, 38),
    ]


def test_of_branches_of_unknown_times_the_one_with_collectives_is_drawn():
    rows = [row("sum", 0, computation="long", conditional=True)]
    for each in rows:
        for name in ("time_s", "hidden_s", "exposed_s"):
            object.__setattr__(each, name, None)
    events = events_in(BRANCHES, rows, Times())
    assert [event.row for event in events if event.row] == ["sum"]


FUSED = """HloModule f, is_scheduled=true, num_partitions=4
%inner (q: f32[2]) -> f32[2] {
  %q = f32[2]{0} parameter(0)
  ROOT %deep = f32[2]{0} all-reduce(%q), replica_groups={}, to_apply=%add
}
ENTRY %main (x: f32[2]) -> f32[2] {
  %x = f32[2]{0} parameter(0)
  %one = f32[2]{0} negate(%x)
  ROOT %two = f32[2]{0} fusion(%one), kind=kCustom, calls=%inner
}"""


def test_collectives_in_fusions_and_of_unknown_time_are_drawn():
    unknown = row("deep", 0, computation="inner", level_bytes={}, kind="all-gather")
    object.__setattr__(unknown, "time_s", None)
    events = events_in(FUSED, [unknown], TIMES)
    (event,) = [e for e in events if e.row]
    assert (event.track, event.start_s, event.note) == ("data", 1 * MS, "its time is not known")


def test_the_file_is_what_perfetto_reads(tmp_path):
    rows = [row("sync", 5), row("start", 10, 3, level_bytes={"slice": 4, "x": 8, "y": 0})]
    events = events_in(OVERLAPPED, rows, TIMES)
    path = tmp_path / "out.json"
    path.write_text("old")
    write_timeline(audit_of(rows, events, 10), str(path))
    trace = json.loads(path.read_text())
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]
    tracks = names_of(trace)
    assert sorted(tracks.values()) == ["compute", "loops and branches", "slice+x", "x"]
    slices = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert len(slices) == len(events)
    (found,) = [e for e in slices if tracks[e["tid"]] == "slice+x"]
    assert (found["ts"], found["dur"], found["name"]) == (8000.0, 10000.0, "all-reduce")
    assert found["args"] == {
        "instruction": "start",
        "bytes": 8,
        "axes": "data",
        "runs": 1,
        "time (s)": 0.01,
        "exposed (s)": 0.007,
        "made by": "user",
        "source": "step.py:7",
        "name stack": "jit(f)/psum",
    }
    for one, other in itertools.pairwise(slices):
        assert one["ts"] <= other["ts"]
    (process,) = [e for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert process["args"] == {"name": "one device, as predicted: 4 devices"}


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path):
    path = tmp_path / "out.json"
    path.write_text("old")
    bad = Event(track="x", name="y", start_s=float("nan"), duration_s=0.0, row=None, note="")
    with pytest.raises(ValueError):
        write_timeline(audit_of([], [bad], 1), path)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("out.json", "old")]
    with pytest.raises(FileNotFoundError, match=r"none/out\.json'$"):
        write_timeline(audit_of([], [], 1), tmp_path / "none" / "out.json")


def test_what_a_link_names_is_replaced_and_a_pipe_is_written_to(tmp_path):
    (tmp_path / "run.json").write_text("old")
    link = tmp_path / "latest.json"
    link.symlink_to("run.json")
    write_timeline(audit_of([], [], 1), link)
    assert link.is_symlink() and "traceEvents" in (tmp_path / "run.json").read_text()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    end = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_timeline(audit_of([], [], 1), pipe)
    assert "traceEvents" in json.loads(os.read(end, 65536))
    os.close(end)
    assert pipe.is_fifo() and len(list(tmp_path.iterdir())) == 3


def layers(target, num_layers):
    """The audit of a scan over layers, each with its weights in eighths on the devices."""
    mesh = aot.mesh(target, (8,), ("data",))

    def step(x, weights):
        def layer(x, w):
            return jax.nn.relu(x @ lax.all_gather(w, "data", tiled=True)), None

        return lax.psum(lax.scan(layer, x, weights)[0].mean(), "data")

    def given(shape, *spec):
        sharding = jax.NamedSharding(mesh, jax.P(*spec))
        return jax.ShapeDtypeStruct(shape, "bfloat16", sharding=sharding)

    fn = jax.shard_map(
        step, mesh=mesh, in_specs=(jax.P("data"), jax.P(None, "data")), out_specs=jax.P(),
        check_vma=False,
    )  # fmt: skip
    arguments = given((8 * 1024, 1024), "data"), given((num_layers, 1024, 1024), None, "data")
    return audit(fn, *arguments)


@pytest.mark.parametrize("target", ["v5e:2x4", "h100:8"])
def test_a_compiled_programs_timeline_ends_with_its_step(target, tmp_path):
    found = layers(target, 48)
    assert found.compute_s > 0 and found.exposed_s > 0
    end_s = max(event.start_s + event.duration_s for event in found.events)
    assert end_s == pytest.approx(found.step_s, rel=1e-9)
    assert {event.row for event in found.events} - {None} == {row.name for row in found.rows}
    (loop,) = [event for event in found.events if event.track == "loops and branches"]
    assert loop.name.endswith(": iterations 2..48, alike")
    path = tmp_path / "out.json"
    found.timeline(path)
    assert path.stat().st_size < 50_000
    names = names_of(json.loads(path.read_text()))
    assert {"compute", "loops and branches"} <= set(names.values()) and len(names) > 2


def test_computation_adds_up_without_loops():
    found = layers("h100:8", 1)
    computed = [e.duration_s for e in found.events if e.track == "compute" and e.row is None]
    assert sum(computed) == pytest.approx(found.compute_s, rel=1e-9)
