"""What hierarchies copy to bring the digit that a stage acts on to the front."""

import pytest

from xcoll.plan import Request, Span, Stage
from xcoll.planner import Maker
from xcoll.policy import Choice, Policy
from xcoll.regrouping import moved_elements, rank_stride
from xcoll.topology import Topology

AXES, SIZES = ("host", "device"), (2, 4)
HOSTS, DEVICES, ALL = Span(("host",), 2), Span(("device",), 4), Span(AXES, 8)


def request(collective: str) -> Request:
    op = "sum" if collective in ("all_reduce", "reduce_scatter") else "none"
    return Request(collective, op, AXES, SIZES, "float32", 4, ((1024,),))


def moved(collective: str, *spans: Span) -> int:
    stages = [Stage(collective, span, Choice("native")) for span in spans]
    return moved_elements(request(collective), stages, 1024)


@pytest.mark.parametrize(
    ("collective", "inner_first", "outer_first"),
    [
        # Gathered by host, then by device: all 8192 change places; the other way round they lie
        # right. Of a reduce-scatter, the whole operand does, or what hosts have left of it; in an
        # all-to-all what went to the front goes back.
        ("all_gather", 0, 8192),
        ("reduce_scatter", 1024, 0),
        ("all_to_all", 2048, 2048),
    ],
)
def test_the_digit_of_a_stage_is_brought_to_the_front(collective, inner_first, outer_first):
    assert moved(collective, DEVICES, HOSTS) == inner_first
    assert moved(collective, HOSTS, DEVICES) == outer_first
    assert moved(collective, ALL) == 0


def test_an_all_reduce_needs_no_order():
    stages = [Stage("reduce_scatter", DEVICES, Choice("native"))]
    stages += [Stage("all_reduce", HOSTS, Choice("native"))]
    stages += [Stage("all_gather", DEVICES, Choice("native"))]
    assert moved_elements(request("all_reduce"), stages, 1024) == 0


def test_strides_are_those_of_the_ranks():
    assert [rank_stride(request("all_gather"), span) for span in (HOSTS, DEVICES, ALL)] == [4, 1, 1]
    halves = Span(("device",), 2, 2)
    assert rank_stride(request("all_gather"), halves) == 2


def test_the_copy_is_priced_by_the_rate_of_copies():
    topology = Topology.parse("2*cpu:4@200Mbit", dict(zip(AXES, SIZES, strict=True)))
    maker = Maker(request("all_gather"), topology, Policy())
    stages = tuple(Stage("all_gather", span, Choice("native")) for span in (HOSTS, DEVICES))
    alone = sum(
        Maker(
            Request("all_gather", "none", span.axes, (span.num_ranks,), "float32", 4, ((size,),)),
            topology,
            Policy(),
        ).native.time_ps
        or 0
        for span, size in ((HOSTS, 1024), (DEVICES, 2048))
    )
    assert topology.device is not None
    copied_ps = -(-8192 * 4 * 10**12 // topology.device.copy_bytes_per_s)
    assert maker.price(stages) == alone + copied_ps
