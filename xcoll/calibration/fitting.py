"""Fits the terms of the cost model to what was measured.

What a permute takes is ``step + latency + messages * bytes / bandwidth + bytes / memory``
(`xcoll.runs`): inside a host without the wire. XLA's own collectives are kept as curves. From all
times what an empty program takes is taken off: a plan of several operations starts only once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import median

from xcoll.calibration.families import CHAIN, CODECS, LOCAL_SIZES, OVERLAP, Family
from xcoll.calibration.lines import line, rising
from xcoll.calibration.result import Sample, Term
from xcoll.codecs.table import named
from xcoll.hardware.curves import MEASURABLE, Points
from xcoll.hardware.fields import LARGEST
from xcoll.natives import passed_ps
from xcoll.runs import start_ps
from xcoll.topology import AxisLinks, CodecRate, Curve, Device, Level, Topology

PS = 10**12

_LEAST_WIRE = 0.02
"""Share of a transfer's time that is the wire's at least, where the device's work hides it."""

_BANDWIDTH_BOUND = 5
"""A transfer that takes so many times what the smallest one does is a matter of the rate."""

_SMALL_BYTES = 2**13
"""Up to here a permute's time is its start."""

_CACHED_BYTES = 2**22
"""Up to here one rate holds for permutes inside a host."""

_DUPLEX_BYTES = 2**18
"""Both ways of a link are compared from here on: below, latency hides the wire."""


@dataclass(frozen=True)
class _Fit:
    """A line through the times of some permutes, and how far off it is."""

    intercept_s: float
    s_per_byte: float
    off: tuple[float, ...]

    def term(self, name: str, value: float, unit: str) -> Term:
        return _term(name, value, unit, self.off)


def fit(
    skeleton: Topology, families: Sequence[Family], samples: Sequence[Sample]
) -> tuple[Topology, tuple[Term, ...]]:
    """Returns the topology with its figures as measured, and the terms with their errors.

    Args:
      skeleton: the levels that the axes lie on, figures as the tables have them.
      families: what was measured.
      samples: of them.
    """
    assert skeleton.device is not None
    launches = [s for s in samples if s.kind == "launch"]
    launch_s = min((s.median_s for s in launches), default=0.0)
    by_kind: dict[tuple[str, tuple[str, ...], str], list[Sample]] = {}
    for sample in samples:
        # Not below a tenth of what was seen: a launch varies, and times stay positive.
        net = max(sample.median_s - launch_s, 0.1 * sample.median_s)
        key = (sample.kind, sample.axes, sample.of)
        by_kind.setdefault(key, []).append(replace(sample, median_s=net))
    terms = [_term("launch", launch_s, "s", [s.spread_s / s.median_s for s in launches])]
    device, found = _device(skeleton.device, by_kind)
    terms += found
    axes, found = _links(skeleton, device, families, by_kind)
    terms += found
    curves, found = _curves(by_kind)
    terms += found
    measured = replace(skeleton, axes=axes, device=device, measured=curves)
    return measured, tuple(terms)


_Samples = dict[tuple[str, tuple[str, ...], str], list[Sample]]


def _device(device: Device, by_kind: _Samples) -> tuple[Device, list[Term]]:
    terms: list[Term] = []
    fitted = replace(device, version="")
    shifts = [s for (kind, *_), found in by_kind.items() if kind == "shift" for s in found]
    if device.platform == "cpu":
        fitted, terms = _starts(fitted, by_kind)
        if shifts:
            fitted, more = _inside(fitted, shifts)
            terms += more
    passes = {kind: s for (kind, *_), s in by_kind.items() if kind in ("copy", "sum")}
    largest = {}
    for kind, found in passes.items():
        if usual := [s for s in found if s.num_bytes <= LOCAL_SIZES[-1]]:
            largest[kind] = max(usual, key=lambda s: s.num_bytes)
    if largest:
        for kind, sample in largest.items():
            terms.append(_of_sample(kind, sample))
        slowest = max(s.median_s / s.num_bytes for s in largest.values())
        fitted = replace(fitted, copy_bytes_per_s=_rate(slowest))
        if "copy" in largest:
            fitted = replace(fitted, fresh_points=_fresh(largest["copy"], passes["copy"]))
    rates = []
    for codec in CODECS:
        ways = {}
        for (kind, _, of), found in by_kind.items():
            if of == codec and kind in ("encode", "decode"):
                sample = max(found, key=lambda s: s.num_bytes)
                ways[kind] = _rate(sample.median_s / sample.num_bytes)
                terms.append(_of_sample(f"{kind} {codec}", sample))
        if len(ways) == 2:
            rates.append(
                CodecRate(
                    codec=str(named(codec)),
                    encode_bytes_per_s=ways["encode"],
                    decode_bytes_per_s=ways["decode"],
                )
            )
    beside = {kind: s[0] for (kind, *_), s in by_kind.items() if kind in OVERLAP}
    if len(beside) == len(OVERLAP):
        wire, work, both = (beside[kind] for kind in OVERLAP)
        shorter_s = min(wire.median_s, work.median_s)
        hidden = (wire.median_s + work.median_s - both.median_s) / shorter_s
        percent = min(max(round(100 * hidden), 0), 100)
        fitted = replace(fitted, overlap_percent=percent)
        off = (wire.spread_s + work.spread_s + both.spread_s) / shorter_s
        terms.append(_term("work beside a transfer: overlap", percent, "%", (off,)))
    return replace(fitted, codec_rates=tuple(rates)), terms


def _fresh(usual: Sample, copies: Sequence[Sample]) -> Points:
    """Returns what large copies take beyond the rate of a usual one, by size."""
    large = sorted((s for s in copies if s.num_bytes > usual.num_bytes), key=lambda s: s.num_bytes)
    beyond = [s.median_s - usual.median_s * s.num_bytes / usual.num_bytes for s in large]
    steady = rising([max(0.0, time) for time in beyond], [s.count for s in large])
    points = [(s.num_bytes, round(PS * time)) for s, time in zip(large, steady, strict=True)]
    return ((usual.num_bytes, 0), *points) if points else ()


def _starts(device: Device, by_kind: _Samples) -> tuple[Device, list[Term]]:
    """Returns the device with the start of a step, and of one in which one device sends."""
    step_s, off = _least(by_kind)
    if not off:
        return device, []
    terms = [_term("step", step_s, "s", off)]
    fitted = replace(device, step_ps=round(step_s * PS))
    for lone in (s for (kind, *_), found in by_kind.items() if kind == "lone" for s in found):
        lone_s = min(lone.median_s / CHAIN, step_s)
        fitted = replace(fitted, lone_step_ps=round(lone_s * PS))
        apart = lone.spread_s / lone.median_s
        terms.append(_term("step in which one device sends", lone_s, "s", (apart,)))
    return fitted, terms


def _least(by_kind: _Samples) -> tuple[float, tuple[float, ...]]:
    """Returns a step's start, and how far its samples are apart; nothing where there are none.

    It is that of a chain's steps, or what the smallest permutes take at least. A step of a chain
    starts no later than a permute that is alone, which is measured more often.
    """
    smallest = {
        key: min(samples, key=lambda s: s.num_bytes)
        for key, samples in by_kind.items()
        if key[0] in ("chain", "shift", "one_way", "swap", "unlike")
    }
    off = tuple(s.spread_s / s.median_s for s in smallest.values())
    chains = [s.median_s for (kind, *_), s in smallest.items() if kind == "chain"]
    if chains:
        between = ("one_way", "swap", "unlike")
        alone = [s.median_s for (kind, *_), s in smallest.items() if kind in between]
        step_s = median(chains) / CHAIN
        return (min(step_s, median(alone)) if alone else step_s), off
    found = [
        [s.median_s for s in samples if s.num_bytes <= _SMALL_BYTES]
        for (kind, *_), samples in by_kind.items()
        if kind in ("shift", "one_way", "unlike")
    ]
    return min((median(times) for times in found if times), default=0.0), off


def _inside(device: Device, shifts: Sequence[Sample]) -> tuple[Device, list[Term]]:
    """Returns the device with what permutes inside a host take."""
    inside = _fit([s for s in shifts if s.num_bytes <= _CACHED_BYTES])
    memory = _rate(inside.s_per_byte)
    sizes = sorted({s.num_bytes for s in shifts if s.num_bytes > _SMALL_BYTES})
    small = [s.median_s for s in shifts if s.num_bytes <= _SMALL_BYTES]
    start_s = median(small) if small else device.step_ps / PS
    times = [max(s.median_s for s in shifts if s.num_bytes == size) - start_s for size in sizes]
    steady = rising([0.0, *(max(time, 0.0) for time in times)], [1] * (len(times) + 1))[1:]
    for i in reversed(range(len(sizes) - 1)):
        # A byte of a small permute takes no longer than one of a large one: caches hold it.
        steady[i] = min(steady[i], steady[i + 1] * sizes[i] / sizes[i + 1])
    points = ((0, 0), *zip(sizes, (round(PS * time) for time in steady), strict=True))
    fitted = replace(
        device,
        memory_bytes_per_s=memory,
        permute_points=points if len(points) > 1 else (),
    )
    return fitted, [inside.term("permute inside a host", memory, "bytes/s")]


def _links(
    skeleton: Topology, device: Device, families: Sequence[Family], by_kind: _Samples
) -> tuple[tuple[AxisLinks, ...], list[Term]]:
    """Returns the axes with the links of each physical dimension as measured."""
    terms: list[Term] = []
    links = {}
    for level in (level for axis in skeleton.axes for level in axis.levels):
        name, link = level.dimension, level.link
        if name in links or link.network == "memory":
            continue
        of = {f.kind: f for f in families if f.pairs and f.of == name}
        samples = {
            kind: [
                s
                for (k, _, o), found in by_kind.items()
                if (k, o) == (kind, name)
                for s in _slowest(found)
            ]
            for kind in of
        }
        if not samples.get("one_way"):
            continue
        one_way = _fit_link([_on_wire(device, sample) for sample in samples["one_way"]])
        rate = _rate(one_way.s_per_byte / of["one_way"].messages)
        start_s = (device.step_ps + start_ps(device)) / PS
        latency_s = max(0.0, one_way.intercept_s - start_s)
        link = replace(link, bandwidth_bytes_per_s=rate, latency_ps=round(latency_s * PS))
        terms.append(one_way.term(f"{name}: bandwidth", rate, "bytes/s"))
        terms.append(one_way.term(f"{name}: latency", latency_s, "s"))
        for kind in ("swap", "unlike"):
            far = [s for s in samples.get(kind, []) if s.num_bytes >= _DUPLEX_BYTES]
            far = far or sorted(samples.get(kind, []), key=lambda s: s.num_bytes)[-1:]
            if not far:
                continue
            messages = of[kind].messages
            # Median over the sizes, of the wire's own time against that of a single direction.
            wires = [_on_wire(device, s).median_s - one_way.intercept_s for s in far]
            full = [messages * s.num_bytes / rate for s in far]
            ratio = median(wire / time for wire, time in zip(wires, full, strict=True))
            percent = min(max(round(100 * ratio), 100), 10_000)
            if kind == "swap":
                link = replace(link, swap_percent=percent)
            else:
                link = replace(link, unlike_percent=percent)
            off = tuple(
                abs((time * percent / 100 - wire) / s.median_s)
                for wire, time, s in zip(wires, full, far, strict=True)
            )
            terms.append(_term(f"{name}: {kind}", percent, "%", off))
        links[name] = link

    def measured(level: Level) -> Level:
        link = links.get(level.dimension, level.link)
        is_known = level.dimension in links
        # What the slowest port gave is all that was seen.
        rates = () if is_known else level.rates_bytes_per_s
        return replace(level, link=link, rates_bytes_per_s=rates)

    axes = tuple(replace(axis, levels=tuple(map(measured, axis.levels))) for axis in skeleton.axes)
    return axes, terms


def _curves(by_kind: _Samples) -> tuple[tuple[Curve, ...], list[Term]]:
    curves, terms = [], []
    for (kind, axes, _), found in by_kind.items():
        if kind not in MEASURABLE or len(found) < 2:
            continue
        found = sorted(found, key=lambda s: s.num_bytes)
        times = rising([s.median_s for s in found], [s.count for s in found])
        points = tuple(
            (s.num_bytes, max(1, round(t * PS))) for s, t in zip(found, times, strict=True)
        )
        curves.append(Curve(collective=kind, axes=axes, points=points))
        (low, start), (high, end) = points[-2:]
        rate = min((high - low) * PS / max(end - start, 1), float(LARGEST))
        off = tuple(s.spread_s / s.median_s for s in found)
        terms.append(_term(f"{kind} over {', '.join(axes)}", rate, "bytes/s", off))
    return tuple(curves), terms


def _slowest(samples: Sequence[Sample]) -> list[Sample]:
    """Returns of each size what took longest: other pairs may have a faster link."""
    found: dict[int, Sample] = {}
    for sample in samples:
        other = found.setdefault(sample.num_bytes, sample)
        found[sample.num_bytes] = max(sample, other, key=lambda s: s.median_s)
    return list(found.values())


def _fit(samples: Sequence[Sample]) -> _Fit:
    points = [(float(s.num_bytes), s.median_s) for s in samples]
    intercept, slope = line(points)
    off = tuple(abs((intercept + slope * size) / time - 1) for size, time in points)
    return _Fit(intercept, slope, off)


def _on_wire(device: Device, sample: Sample) -> Sample:
    """Returns a permute's time without what the device itself takes."""
    passes = 1 if device.platform == "cpu" else 2
    own = passed_ps(device, passes * sample.num_bytes) / PS
    left = max(sample.median_s - own, _LEAST_WIRE * sample.median_s)
    return replace(sample, median_s=left)


def _fit_link(samples: Sequence[Sample]) -> _Fit:
    """Fits the wire's rate to the large sizes, and what comes before it to the smallest.

    In between a line does not hold: what fits the buffers of a network is off at once.
    """
    points = sorted((float(s.num_bytes), s.median_s) for s in samples)
    large = [p for p in points if p[1] > _BANDWIDTH_BOUND * points[0][1]]
    slopes = [
        (high[1] - low[1]) / (high[0] - low[0])
        for low, high in combinations(large[-3:], 2)
        if high[0] > low[0]
    ]
    if not slopes:
        return _fit(samples)
    slope = max(median(slopes), 0.0)
    intercept = max(points[0][1] - slope * points[0][0], 0.0)
    off = tuple(abs((intercept + slope * size) / time - 1) for size, time in points)
    return _Fit(intercept, slope, off)


def _of_sample(name: str, sample: Sample) -> Term:
    rate = _rate(sample.median_s / sample.num_bytes)
    return _term(name, rate, "bytes/s", (sample.spread_s / sample.median_s,))


def _term(name: str, value: float, unit: str, off: Sequence[float]) -> Term:
    return Term(
        name=name,
        value=float(value),
        unit=unit,
        error=median(off) if off else 0.0,
        worst=max(off, default=0.0),
        points=len(off),
    )


def _rate(s_per_byte: float) -> int:
    return min(max(1, round(1 / max(s_per_byte, 1e-18))), LARGEST)
