"""What XLA's own collectives cost: libtpu, NCCL and Gloo, each by its own algorithm.

References:
  TPU: "How to Scale Your Model", Google, 2026 revision, chapters on TPUs and sharding.
  GPU: NCCL 2.30, ``src/graph/tuning.cc``.
  CPU: measured with Gloo; see ``xcoll/hardware/cpu.json``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from xcoll.hardware import figure, kinds
from xcoll.hardware.curves import Curve, between
from xcoll.loads import loads
from xcoll.plan import Span
from xcoll.schedule import FROM_SHARES, TO_SHARES, Phase
from xcoll.topology import Device, Digit, Topology

PS = 10**12
"""Picoseconds in a second."""


def transfer_ps(num_bytes: int, bytes_per_s: int) -> int:
    """Returns the picoseconds that bytes take, rounded up."""
    return -(-num_bytes * PS // bytes_per_s)


def passed_ps(device: Device, num_bytes: int) -> int:
    """Returns the time that bytes take to pass a device's memory, in a permute."""
    if device.permute_points:
        return between(device.permute_points, num_bytes)
    return transfer_ps(num_bytes, device.memory_bytes_per_s)


def fresh_ps(device: Device, num_bytes: int) -> int:
    """Returns what a result of so many bytes takes beyond the rates, for its memory."""
    return between(device.fresh_points, num_bytes) if device.fresh_points else 0


def result_bytes(collective: str, num_bytes: int, num_ranks: int) -> int:
    """Returns the bytes of a collective's result on a rank, of those of its operand."""
    if collective in FROM_SHARES:
        return num_bytes * num_ranks
    return num_bytes // num_ranks if collective in TO_SHARES else num_bytes


def _fresh_beyond(device: Device, span: Span, curve: Curve, num_bytes: int) -> int:
    """Returns what the memory of a result takes beyond what is in a curve's last point."""
    whole, known = (
        fresh_ps(device, result_bytes(curve.collective, size, span.num_ranks))
        for size in (num_bytes, curve.points[-1][0])
    )
    return whole - known


def _share(num_bytes: int, parts: int, of: int) -> int:
    """Returns the bytes of some of as many equal parts, rounded up."""
    return -(-num_bytes * parts // of)


def native_ps(device: Device, digits: tuple[Digit, ...], collective: str, num_bytes: int) -> int:
    """Returns the predicted time of XLA's own collective.

    Args:
      device: the devices.
      digits: the levels its ranks lie on, innermost first (`xcoll.loads.span_digits`).
      collective: ``all_reduce``, ``reduce_scatter``, ``all_gather``, ``all_to_all`` or ``permute``;
        on a GPU also ``broadcast``.
      num_bytes: bytes of the operand on each rank.
    """
    ranks = math.prod(d.level.size for d in digits)
    if ranks == 1:
        return 0
    if collective == "permute":
        return device.step_ps + passed_ps(device, num_bytes) + _wire(digits, Phase(1, 1), num_bytes)
    price = {"cpu": _cpu, "gpu": _gpu, "tpu": _tpu}[device.platform]
    return device.step_ps + price(device, digits, collective, num_bytes, ranks)


def native_on(
    topology: Topology,
    span: Span,
    digits: tuple[Digit, ...],
    collective: str,
    num_bytes: int,
    *,
    at_best: bool = False,
) -> int:
    """Returns the predicted time of XLA's own collective: as measured, else as `native_ps` says.

    Beyond the largest size that was measured, it grows as `native_ps` does, corrected by how the
    measured times grow.

    Args:
      topology: a known topology.
      span: the ranks it connects; what is measured goes over whole axes.
      digits: the levels they lie on (`xcoll.loads.span_digits`).
      collective: as for `native_ps`.
      num_bytes: bytes of the operand on each rank.
      at_best: beyond what was measured, times may grow less than `native_ps` does. So is native
        priced as the rival of plans, which must not be slower, but not as a stage of them: devices
        that come to an exchange at different times may use both directions of a link, and those
        that come from the stage before do not.
    """
    assert topology.device is not None
    if topology.measured and span.num_ranks == math.prod(
        topology.axis_sizes[axis] for axis in span.axes
    ):
        curve = topology.curve(collective, span.axes)
        if curve is not None:
            if num_bytes <= curve.points[-1][0]:
                return curve.time_ps(num_bytes)
            price = functools.partial(native_ps, topology.device, digits, collective)
            fresh = 0 if at_best else _fresh_beyond(topology.device, span, curve, num_bytes)
            return _beyond(curve, num_bytes, price, at_best) + fresh
    return native_ps(topology.device, digits, collective, num_bytes)


def _beyond(curve: Curve, num_bytes: int, price: Callable[[int], int], at_best: bool) -> int:
    """Returns the time beyond a curve's last point: it grows as the price does.

    Where the last two points grow about as their sizes do, the price is corrected by what grows
    between them: twice at the most, and half if at best. Where they do not, they are of the start.
    """
    (before, short), (largest, longest) = curve.points[-2:]
    growth = max(0, price(num_bytes) - price(largest))
    expected, found = price(largest) - price(before), longest - short
    if expected > 0 and 2 * found * largest >= longest * (largest - before):
        found = min(max(found, expected // 2 if at_best else expected), 2 * expected)
        growth = growth * found // expected
    return longest + growth


def _wire(digits: tuple[Digit, ...], phase: Phase, num_bytes: int) -> int:
    worst = 0
    for load in loads(digits, phase):
        level = load.digit.level
        time = transfer_ps(load.messages * num_bytes, level.bandwidth_bytes_per_s)
        worst = max(worst, time + load.hops * level.link.latency_ps)
    return worst


def _cpu(
    device: Device, digits: tuple[Digit, ...], collective: str, num_bytes: int, ranks: int
) -> int:
    """One process: shared memory. Several: Gloo, whose all-reduce is one flat ring."""
    digits = _hosts_outside(digits)
    whole = num_bytes * ranks if collective == "all_gather" else num_bytes
    passed = whole if collective == "all_reduce" else _share(whole, ranks - 1, ranks)
    work = transfer_ps(passed, device.memory_bytes_per_s)
    if device.num_hosts == 1:
        return work
    steps = (2 if collective == "all_reduce" else 1) * (ranks - 1)
    share = _share(whole, 1, ranks)
    duplex = int(figure("cpu", f"duplex_{collective}"))
    if collective == "all_to_all":
        # Every rank sends a share to every other; those to other hosts pass the uplink.
        time = 0
        for digit in digits:
            level = digit.level
            if level.link.network != "memory":
                crossing = _share(share * ranks, level.size - 1, level.size) * level.shared_by
                time = max(time, transfer_ps(crossing, level.bandwidth_bytes_per_s))
        latency = max((d.level.link.latency_ps for d in digits), default=0)
        return work + time * duplex // 100 + steps * (device.step_ps + latency)
    latency = max((x.digit.level.link.latency_ps for x in loads(digits, Phase(1, 1))), default=0)
    wire = _wire(digits, Phase(1, 1), share) - latency
    return work + steps * (max(0, wire) * duplex // 100 + device.step_ps + latency)


def _hosts_outside(digits: tuple[Digit, ...]) -> tuple[Digit, ...]:
    """Numbers the ranks as the kindest ring would, host by host.

    In the program's order, every hop may leave its host, where the hosts are the inner axis; but
    native is not to be priced slower than it can be.
    """
    out, stride = [], 1
    for digit in sorted(digits, key=lambda d: d.level.link.network != "memory"):
        out.append(replace(digit, stride=stride))
        stride *= digit.level.size
    return tuple(out)


def _tpu(
    device: Device, digits: tuple[Digit, ...], collective: str, num_bytes: int, ranks: int
) -> int:
    """Rings over all torus axes at once, both ways; cores before, slices after, on the shares.

    A reduce-scatter inside slices and between them is an all-reduce inside (`xcoll.libtpu.parts`),
    unless the slices vary fastest.
    """
    cores = [d for d in digits if d.level.link.kind == "core"]
    torus = [d for d in digits if d.level.link.network == "torus"]
    slices = [d for d in digits if d not in cores and d not in torus]
    left = num_bytes * ranks if collective == "all_gather" else num_bytes
    time = 0
    chips = [d.stride for d in (*cores, *torus)]
    is_cut = slices and chips and max(d.stride for d in slices) > min(chips)
    inside = (cores, _dimensions(torus))
    outside = sorted(_dimensions(slices), key=lambda d: -d.level.bandwidth_bytes_per_s)
    for group in (*inside, *([digit] for digit in outside)):
        size = math.prod(d.level.size for d in group)
        if size == 1:
            continue
        latency = sum(_diameter(d) * d.level.link.latency_ps for d in group)
        if collective == "all_to_all":
            time += latency + max(_exchange(d, num_bytes) for d in group)
            continue
        rate = sum(_ring_rate(d) for d in group)
        sweep = transfer_ps(_share(left, size - 1, size), rate)
        is_undone = collective == "reduce_scatter" and is_cut and group in inside
        if collective == "all_reduce" or is_undone:
            # Small payloads go to everyone at once: fewer hops, more bytes.
            at_once = latency + transfer_ps(left * (size - 1), rate)
            time += min(2 * (latency + sweep), at_once)
        else:
            time += latency + sweep
        left = _share(left, 1, size)
    return time


def _dimensions(digits: list[Digit]) -> list[Digit]:
    """Joins the pieces of each dimension, wherever they stand among the ranks: one set of links."""
    out: list[Digit] = []
    for digit in sorted(digits, key=lambda d: (d.level.dimension, d.level.stride)):
        low, high = out[-1].level if out else None, digit.level
        if (
            low is not None
            and (low.dimension, low.link) == (high.dimension, high.link)
            and low.stride * low.size == high.stride
        ):
            out[-1] = replace(out[-1], level=replace(low, size=low.size * high.size))
        else:
            out.append(digit)
    return out


def _diameter(digit: Digit) -> int:
    level = digit.level
    if level.link.network != "torus":
        return 1
    return (level.size // 2 if level.is_ring else level.size - 1) * level.stride


def _ring_rate(digit: Digit) -> int:
    level = digit.level
    ways = 2 if level.is_ring else 1
    stride = level.stride if level.link.network == "torus" else 1
    return max(1, ways * level.bandwidth_bytes_per_s // (stride * level.shared_by))


def _exchange(digit: Digit, num_bytes: int) -> int:
    """All-to-all along one level: what passes the middle, or the port."""
    level = digit.level
    if level.link.network != "torus":
        crossing = _share(num_bytes, level.size - 1, level.size) * level.shared_by
        return transfer_ps(crossing, level.bandwidth_bytes_per_s)
    eighths = level.size if level.is_ring else 2 * level.size
    crossing = _share(num_bytes * level.stride * level.shared_by, eighths, 8)
    return transfer_ps(crossing, level.bandwidth_bytes_per_s)


def _gpu(
    device: Device, digits: tuple[Digit, ...], collective: str, num_bytes: int, ranks: int
) -> int:
    """The cheapest of NCCL's algorithms and protocols by its own tuner."""
    network = [d for d in digits if d.level.link.kind != "nvlink"]
    nodes = math.prod(d.level.size for d in network)
    per_node = ranks // nodes
    whole = num_bytes * ranks if collective == "all_gather" else num_bytes
    nvlink = [d.level.bandwidth_bytes_per_s for d in digits if d.level.link.kind == "nvlink"]
    rates = nvlink + [
        d.level.bandwidth_bytes_per_s * per_node // d.level.shared_by for d in network
    ]
    rate = max(1, min(rates))
    if collective == "all_to_all":
        return _nccl_all_to_all(digits, whole, ranks, nodes, per_node)
    factor = 2 if collective == "all_reduce" else 1
    steps, between = factor * (ranks - 1), factor * (nodes - 1)
    sent = whole if collective == "broadcast" else _share(factor * whole, ranks - 1, ranks)
    times = []
    for p, percent in enumerate(_nccl("protocol_bandwidth")):
        hop = _nccl("network_ring")[p]
        if p == 2 and nodes > 1:
            hop = hop * figure("nccl", "ring_simple_network_latency") // 100
        latency = (
            _nccl("base_ring")[p] + (steps - between) * _nccl("nvlink_ring")[p] + between * hop
        )
        times.append(latency * 1000 + transfer_ps(sent * 100, rate * percent))
        if collective == "all_reduce":
            depth = (nodes - 1).bit_length()
            latency = _nccl("base_tree")[p] + 2 * (
                (per_node - 1) * _nccl("nvlink_tree")[p] + depth * _nccl("network_tree")[p]
            )
            slower = rate * percent * figure("nccl", "tree_bandwidth") // 100
            times.append(latency * 1000 + transfer_ps(2 * whole * 100, slower))
    if collective == "all_reduce" and nodes == 1:
        times += _xla_kernels(num_bytes, ranks, rate)
    if ranks > 2 and collective != "broadcast":
        times += _nvls(device, collective, sent, nodes, rate)
    return min(times)


def _xla_kernels(num_bytes: int, ranks: int, rate: int) -> Iterator[int]:
    """XLA's own all-reduce kernels over NVLink: one hop, or two."""
    hop = _nccl("nvlink_ring")[2] * 1000
    if num_bytes <= figure("nccl", "xla_one_shot"):
        yield hop + transfer_ps(num_bytes * (ranks - 1), rate)
    if num_bytes <= figure("nccl", "xla_two_shot"):
        yield 2 * hop + transfer_ps(_share(2 * num_bytes, ranks - 1, ranks), rate)


def _nvls(device: Device, collective: str, num_bytes: int, nodes: int, rate: int) -> list[int]:
    """Reduction in the NVLink switch: within a node, and for an all-reduce in a tree over nodes."""
    if device.kind not in kinds():
        return []
    # In an all-reduce a port carries less than what the bus bandwidth counts; else just that.
    is_limited = nodes > 1 or collective != "all_reduce"
    rate = min(int(figure(device.kind, "nvls_busbw")), rate if is_limited else PS)
    latency = int(figure("nccl", "nvls_latency"))
    if nodes > 1 and collective != "all_reduce":
        return []
    if nodes > 1:
        latency += 2 * (nodes - 1).bit_length() * int(figure("nccl", "nvlstree_latency"))
    return [latency * 1000 + transfer_ps(num_bytes, rate)]


def _nccl_all_to_all(
    digits: tuple[Digit, ...], num_bytes: int, ranks: int, nodes: int, per_node: int
) -> int:
    time = 0
    for digit in digits:
        level = digit.level
        peers = ranks - per_node if level.link.kind != "nvlink" else per_node - 1
        crossing = _share(num_bytes, peers, ranks) * level.shared_by
        time = max(time, transfer_ps(crossing, level.bandwidth_bytes_per_s))
    # Peers are served a batch at a time.
    batches = -(-(ranks - 1) // int(figure("nccl", "p2p_batch")))
    hop = _nccl("nvlink_ring")[2]
    if nodes > 1:
        hop = _nccl("network_ring")[2] * figure("nccl", "ring_simple_network_latency") // 100
    return time + (_nccl("base_ring")[2] + batches * hop) * 1000


def _nccl(name: str) -> list[int]:
    values: list[int] = figure("nccl", name)
    return values
