"""Functions that name an algorithm with its options, for `xcoll.Policy` and the planner."""

from __future__ import annotations

from xcoll.policy import Choice


def native() -> Choice:
    """Returns the choice of XLA's own collective."""
    return Choice("native")


def ring() -> Choice:
    """Returns the choice of the ring: fewest bytes, ``2 (n - 1)`` steps for an all-reduce."""
    return Choice("ring")


def bidirectional_ring() -> Choice:
    """Returns the choice of two rings, half of the payload each way."""
    return Choice("bidirectional_ring")


def recursive_doubling() -> Choice:
    """Returns the choice of recursive doubling: fewest steps, whole payload each."""
    return Choice("recursive_doubling")


def halving_doubling() -> Choice:
    """Returns the choice of recursive halving and doubling (Rabenseifner)."""
    return Choice("halving_doubling")


def tree(radix: int = 2) -> Choice:
    """Returns the choice of a k-nomial tree.

    >>> print(tree(radix=4))
    tree(radix=4)
    """
    return Choice("tree", (("radix", radix),))


def double_tree(num_chunks: int = 8) -> Choice:
    """Returns the choice of two binary trees, pipelined over ``num_chunks`` chunks each."""
    return Choice("double_tree", (("num_chunks", num_chunks),))


def direct(shots: int = 2) -> Choice:
    """Returns the choice of the direct form: sums in rank order, in one or two shots."""
    return Choice("direct", (("shots", shots),))


def bruck() -> Choice:
    """Returns the choice of Bruck's algorithms: ``ceil(log2 n)`` steps for any ``n``."""
    return Choice("bruck")


def pairwise() -> Choice:
    """Returns the choice of the pairwise exchange: ``n - 1`` steps of one share, sums at owners."""
    return Choice("pairwise")


def torus() -> Choice:
    """Returns the choice of rings over several axes at once, the payload split over them."""
    return Choice("torus")


def hierarchical(*levels: str | Choice, num_segments: int = 1) -> Choice:
    """Returns the choice of a hierarchy: reduce-scatter inside, all-reduce outside, all-gather.

    Args:
      *levels: the algorithm of each level, innermost first; none: native at every level.
      num_segments: more than 1 makes one schedule of two levels, whose steps hold pairs of both:
        the payload is pipelined through them, in ``num_segments - 1`` slots a rank.

    Raises:
      TypeError: a level is neither a name nor a choice.

    >>> print(hierarchical("native", ring()))
    hierarchical(native, ring)
    """
    for level in levels:
        if not isinstance(level, str | Choice):
            raise TypeError(f"hierarchical({level!r}): a level must be a name or a choice")
    made = tuple(Choice(level) if isinstance(level, str) else level for level in levels)
    options = (("num_segments", num_segments),) if num_segments != 1 else ()
    return Choice("hierarchical", options, made)
