"""Collectives of a compiled program counted without the reader."""

import re
from collections import Counter

_KINDS = (
    "(?:ragged-)?all-to-all|all-reduce|reduce-scatter|all-gather|collective-permute"
    "|collective-broadcast|send|recv"
)


def plain_count(program):
    """Operations that move data in a compiled program, by kind.

    Of those printed again for each step of an overlap (they carry a chain id) the first counts.
    """
    found, chains = Counter(), set()
    for line in program.as_text().splitlines():
        if match := re.search(rf" ({_KINDS})(?:-start)?\(", line.partition(" metadata=")[0]):
            chain = re.search(r'chain_id="(\d+)"', line)
            if chain and chain[1] in chains:
                continue
            chains |= {chain[1]} if chain else set()
            found[match[1]] += 1
    return found


def row_count(program, rows):
    """Rows by kind, what the TPU compiler fused into a reduce-scatter as the program prints it."""
    fused = set(re.findall(r"^%(all-reduce-scatter[\w.]*) ", program.as_text(), re.MULTILINE))
    return Counter("all-reduce" if row.computation in fused else row.kind for row in rows)
