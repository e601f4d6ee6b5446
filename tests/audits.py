"""Audits written by hand, for what reads audits."""

from xcoll.hlo.result import Audit
from xcoll.hlo.rows import Row
from xcoll.memory import Memory


def row(name, kind="all-reduce", **changes):
    """A collective of f32[256] over ``data``, made by the user at step.py:7."""
    fields = dict(
        name=name,
        kind=kind,
        dtypes=("f32",),
        num_bytes=1024,
        operands=(("f32", (256,)),),
        axes=("data",),
        num_ranks=4,
        executions=1,
        conditional=False,
        transfer=None,
        wire_bytes={"data": 1536, "model": 0},
        level_bytes={},
        time_s=4e-6,
        bound_s=3e-6,
        is_async=False,
        hidden_s=1e-6,
        exposed_s=3e-6,
        source="step.py:7",
        is_near=False,
        made_by="user",
        computation="main",
        op_name="jit(step)/psum",
        unread="",
    )
    return Row(**fields | changes)


def audit(*rows, **changes):
    """An audit on a mesh of data=4, model=2, of a program that computes for 6 us."""
    fields = dict(
        rows=rows,
        axis_sizes={"data": 4, "model": 2},
        topology="v5e:2x4\n  data=4: ring",
        wire_bytes={"data": 1536, "model": 0},
        level_bytes={},
        compute_s=6e-6,
        compute_source="optimal_seconds",
        memory=Memory(arguments=4096, outputs=2048, aliased=1024, temporaries=512, code=128),
        advice=(),
        events=(),
    )
    return Audit(**fields | changes)
