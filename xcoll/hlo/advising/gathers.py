"""All-gathers that a loop makes again in every iteration, of a parameter that stays the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from xcoll.hlo.advising.flow import Flow
from xcoll.hlo.advising.sources import origin
from xcoll.hlo.advising.words import listed, places
from xcoll.hlo.rows import Advice, Row, total_s
from xcoll.units import readable_bytes


def repeated_gathers(flow: Flow, rows: Sequence[Row]) -> Iterator[Advice]:
    """Yields one advice for each loop that gathers arguments of the program anew.

    A loop that gathers another slice of a stack of weights in each iteration does not: that is how
    fully sharded weights are meant to be used.
    """
    loops: dict[tuple[str, int | None], list[tuple[Row, tuple[str, ...]]]] = {}
    for row in rows:
        if row.kind == "all-gather":
            i = flow.module.computations[row.computation].instructions[row.name]
            found = [origin(flow, row.computation, operand) for operand in i.operands]
            # All that a combined operation gathers must be worth gathering once.
            origins = [origin for origin in found if origin is not None]
            if len(origins) == len(found) and all(o.repeats != 1 for o in origins):
                arguments = tuple(name for o in origins for name in o.arguments)
                key = (origins[0].loop, origins[0].repeats)
                loops.setdefault(key, []).append((row, arguments))
    for (_, repeats), gathers in loops.items():
        found_rows = [row for row, _ in gathers]
        names = listed([name for _, arguments in gathers for name in arguments])
        whole = sum(row.num_bytes * row.num_ranks for row in found_rows)
        saves_s = None
        if repeats is not None:
            once = [(row, row.runs - row.runs // repeats) for row in found_rows]
            saves_s = total_s((row.exposed_s, runs) for row, runs in once)
        how_often = "in every iteration" if repeats is None else f"{repeats} times"
        yield Advice(
            kind="gather-in-loop",
            text=(
                f"A loop gathers {names} {how_often}, the same values each"
                f" time{places(found_rows)}. Gather outside it, by"
                " jax.lax.with_sharding_constraint, or all_gather in a shard_map; each device"
                f" then keeps {readable_bytes(whole)} for as long as the loop runs."
            ),
            rows=tuple(row.name for row in found_rows),
            saves_s=saves_s,
        )
