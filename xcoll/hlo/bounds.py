"""How fast a collective could be at most: what must cross the links, over what they can carry.

Take the physical dimensions from the outermost inwards. At each depth the devices that agree in
all dimensions so far are one node, and only traffic between nodes is counted, on the links of
these dimensions: whatever stays inside a node may be free. With B bytes of operand, s nodes of a
group, and n ranks, m of them in node i, and no matter which algorithm:

* Node i. All-reduce: the others need its sum and it needs theirs, B out and B in, even where the
  network itself adds. Reduce-scatter: of the shares of the others its own sum must go out,
  (n - m) / n · B; of its own shares at least one sum must come in, m / n · B. All-gather: the
  reverse, m · B out and (n - m) · B in. All-to-all: m (n - m) / n · B each way. Broadcast: B, into
  each node but the root's. Over what the node's own ports and links carry.
* All nodes together. All-reduce: 2 (s - 1) · B, since to learn a sum of s terms everywhere takes
  2 (s - 1) messages for each element (gossip one way: s - 1 to bring all to one place, s - 1 until
  the last one knows); not where switches add or copy. The others: the sum over the nodes. A
  message between nodes passes as many links of a torus as its nearest nodes are apart. Over what
  all links carry.
* All-to-all on a torus, along each of its dimensions. On a line: over each cut, what goes from the
  one side to the other. On a ring: each message as many links as the shorter way has.

Groups that run at the same time and share links are counted together as well. Links are those on
shortest ways between the ranks; no latency and no start is counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction

import numpy as np

from xcoll.hlo.torus import Bools, Part, is_torus, through_torus, worst
from xcoll.hlo.wires import is_exchange
from xcoll.routes import Dimension, Ints, numbered


def bound_s_per_byte(
    kind: str, groups: Ints, dimensions: Sequence[Dimension], adding: frozenset[str]
) -> Fraction:
    """Returns a lower bound on the time of a collective, for each byte of its operand.

    Args:
      kind: as `xcoll.hlo.wires.carried` returns it; no permute.
      groups: array [group, rank] of devices; all groups run at the same time.
      dimensions: of the network, outermost first (`xcoll.routes.Routes.dimensions`).
      adding: names of the dimensions whose switches reduce and copy by themselves.
    """
    wired = [d for d in dimensions if d.level.link.network != "memory"]
    found = [Fraction(0)]
    for depth in range(1, len(wired) + 1):
        if depth < len(wired) and is_torus(wired[depth - 1]) and is_torus(wired[depth]):
            continue  # the dimensions of a torus are one level
        found += _at_depth(kind, groups, wired[:depth], adding)
    if is_exchange(kind):
        found += through_torus(groups, wired)
    return max(found)


def port_rates(dimension: Dimension) -> Ints:
    """Returns the bytes a second, one way, of each port of a dimension (torus: of each link)."""
    level = dimension.level
    rates = np.full(int(dimension.port.max()) + 1, level.bandwidth_bytes_per_s, np.int64)
    if level.rates_bytes_per_s:
        each = np.array(level.rates_bytes_per_s, np.int64)
        rates[dimension.port] = np.minimum(
            each[dimension.position], level.link.bandwidth_bytes_per_s
        )
    return rates


def _at_depth(
    kind: str, groups: Ints, used: Sequence[Dimension], adding: frozenset[str]
) -> Iterator[Fraction]:
    """Yields the bounds on the nodes, and on all of them, of devices that agree in ``used``."""
    node = numbered([d.position for d in used], len(used[0].position))[groups]
    crosses = (node != node[:, :1]).any(axis=1)
    groups, node = groups[crosses], node[crosses]
    if not len(groups):
        return
    num_groups, num_ranks = groups.shape
    number = np.broadcast_to(np.arange(num_groups)[:, None], groups.shape)
    parts = {d.name: Part.of(d, groups, used) for d in used if is_torus(d)}
    ways = {d.name: _ways(d, groups, parts) for d in used}
    own, owner, members = np.unique(
        number * (int(node.max()) + 1) + node, return_inverse=True, return_counts=True
    )
    owner = owner.reshape(groups.shape)
    demands = _node_units(kind, members, num_ranks, owner[:, 0])
    # Each group's node by itself, and the nodes of all groups at the same place together.
    _, place = np.unique(node, return_inverse=True)
    for label in (owner, place.reshape(groups.shape)):
        capacity = _capacity(label, groups, used, ways)
        for demand in demands:
            first = np.zeros(len(own), np.int64)
            first[owner.ravel()] = label.ravel()
            units = np.bincount(first, demand, len(capacity)).astype(np.int64)
            yield worst(units, capacity, num_ranks)
    if kind == "all-reduce" and any(d.name in adding for d in used):
        return
    group_of = own // (int(node.max()) + 1)
    num_nodes = np.bincount(group_of)
    squares = np.bincount(group_of, members**2).astype(np.int64)
    total = _total_units(kind, num_nodes, num_ranks, squares)
    switches = [d for d in used if not is_torus(d)]
    ports = [_capacity(label, groups, switches, ways) for label in (number, np.zeros_like(number))]
    torus = [(d, parts[d.name]) for d in used if is_torus(d)]
    yield from _all_links(total, num_ranks, ports[0], int(ports[1][0]), torus)


def _node_units(kind: str, members: Ints, num_ranks: int, roots: Ints) -> tuple[Ints, ...]:
    """Returns what each node must send and receive, in n-ths of the operand."""
    others = num_ranks - members
    if is_exchange(kind):
        return (members * others,)
    if kind == "reduce-scatter":
        return others, members
    if kind == "all-gather":
        return members * num_ranks, others * num_ranks
    everyone = np.full(len(members), num_ranks, np.int64)
    if kind == "all-reduce":
        return (everyone,)
    root = np.zeros_like(everyone)
    root[roots] = num_ranks
    return root, everyone - root


def _total_units(kind: str, num_nodes: Ints, num_ranks: int, squares: Ints) -> Ints:
    """Returns what the nodes of each group send together, in n-ths of the operand."""
    if is_exchange(kind):
        return num_ranks**2 - squares
    each = {
        "all-reduce": 2 * num_ranks,
        "reduce-scatter": num_ranks,
        "all-gather": num_ranks**2,
        "collective-broadcast": num_ranks,
    }[kind]
    return (num_nodes - 1) * each


def _ways(dimension: Dimension, groups: Ints, parts: dict[str, Part]) -> tuple[Bools, ...]:
    """Returns which ranks have a port, or links up and down, that their group uses."""
    if dimension.name in parts:
        return parts[dimension.name].low, parts[dimension.name].high
    at = dimension.position[groups]
    crosses = (at != at[:, :1]).any(axis=1)
    return (np.broadcast_to(crosses[:, None], groups.shape),)


def _capacity(
    label: Ints, groups: Ints, used: Sequence[Dimension], ways: dict[str, tuple[Bools, ...]]
) -> Ints:
    """Returns the bytes a second, one way, of the ports and links at the ranks of each label."""
    out = np.zeros(int(label.max()) + 1, np.int64)
    for dimension in used:
        rates = port_rates(dimension)
        cell = label * len(rates) + dimension.port[groups]
        for way in ways[dimension.name]:
            # A port or link that several ranks share counts once.
            cells = np.unique(cell[way])
            np.add.at(out, cells // len(rates), rates[cells % len(rates)])
    return out


def _all_links(
    units: Ints,
    num_ranks: int,
    ports: Ints,
    ports_together: int,
    torus: Sequence[tuple[Dimension, Part]],
) -> Iterator[Fraction]:
    """Yields total over capacity, for each group by itself and for all of them together."""
    columns = [units, ports]
    for _, part in torus:
        columns += [part.links, part.apart]
    for row in np.unique(np.stack(columns, axis=1), axis=0).tolist():
        rate = Fraction(row[1])
        for (dimension, _), links, apart in zip(torus, row[2::2], row[3::2], strict=True):
            # A message takes `apart` links of the dimension, at least.
            rate += Fraction(links * dimension.level.bandwidth_bytes_per_s, apart)
        yield Fraction(row[0], num_ranks) / rate
    rate = Fraction(ports_together)
    for dimension, part in torus:
        links = min(int(part.links.sum()), part.links_together)
        nearest = int(part.apart[part.links > 0].min(initial=dimension.level.extent))
        rate += Fraction(links * dimension.level.bandwidth_bytes_per_s, nearest)
    yield Fraction(int(units.sum()), num_ranks) / rate
