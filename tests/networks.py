"""Small networks on which schedules are simulated and priced."""

from xcoll.topology import AxisLinks, Device, Level, Link, Topology


def device(platform="tpu", hosts=1):
    """A device whose own work takes next to no time, so that links decide."""
    return Device(
        kind="test",
        platform=platform,
        memory_bytes_per_s=10**15,
        copy_bytes_per_s=10**15,
        step_ps=10,
        num_hosts=hosts,
    )


def _axis(*levels):
    return (AxisLinks(name="x", levels=levels),)


def torus(*sizes, wrap=True):
    """One mesh axis over a torus (or a mesh of lines); the first dimension is the outermost."""
    link = Link(kind="ici", network="torus", bandwidth_bytes_per_s=10**9, latency_ps=7)
    levels = [
        Level(size=size, link=link, dimension=f"d{i}", wrap=wrap) for i, size in enumerate(sizes)
    ]
    return Topology(axes=_axis(*reversed(levels)), device=device())


def switch(num_ranks):
    """One mesh axis behind a switch, a port a rank."""
    link = Link(kind="nvlink", network="switch", bandwidth_bytes_per_s=10**9, latency_ps=7)
    level = Level(size=num_ranks, link=link, dimension="d")
    return Topology(axes=_axis(level), device=device())


def hosts(num_hosts, per_host, platform="tpu"):
    """One mesh axis over hosts whose devices share an uplink, a tenth as fast as inside.

    CPU hosts swap half-duplex, as over Gloo.
    """
    duplex = {"swap_percent": 196, "unlike_percent": 101} if platform == "cpu" else {}
    inner = Link(kind="nvlink", network="switch", bandwidth_bytes_per_s=10**10, latency_ps=2)
    outer = Link(
        kind="network", network="switch", bandwidth_bytes_per_s=10**9, latency_ps=7, **duplex
    )
    return Topology(
        axes=_axis(
            Level(size=per_host, link=inner, dimension="device"),
            Level(size=num_hosts, link=outer, dimension="host", shared_by=per_host),
        ),
        device=device(platform, num_hosts),
    )
