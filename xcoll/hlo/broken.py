"""Limits of a budget that a program breaks, in words."""

from __future__ import annotations

from dataclasses import dataclass

from xcoll.hlo.budgets import Limit
from xcoll.units import readable_bytes, readable_time

_MOST_SITES = 5


@dataclass(frozen=True, kw_only=True)
class Blame:
    """What contributes to a broken limit.

    Attributes:
      site: where it comes from, in words, its source line first.
      amount: its part: bytes, operations, or picoseconds of exposed time; None where not known.
      share: the same as a fraction of all contributions.
      why: why it cannot be shown to be within the limit; empty where it was measured.
    """

    site: str
    amount: int | float | None = None
    share: float | None = None
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Breach:
    """A limit that a program breaks, or cannot be shown to keep.

    Attributes:
      limit: what was allowed.
      measured: what was found, in the limit's unit; a lower bound where ``why`` is not empty; None
        where nothing could be measured.
      why: why the limit cannot be shown to hold; empty where all was measured.
      blame: the sites, what is not known first, then those with the largest part.
    """

    limit: Limit
    measured: int | float | None
    why: str
    blame: tuple[Blame, ...]

    def __str__(self) -> str:
        lines = [f"{self.limit.name}: {self._head()}"]
        for blame in self.blame[:_MOST_SITES]:
            lines.append(f"    {self._amount(blame)}: {blame.site}")
        if len(self.blame) > _MOST_SITES:
            lines.append(f"    and {len(self.blame) - _MOST_SITES} more")
        return "\n".join(lines)

    def _head(self) -> str:
        if self.measured is None:
            (allowed,) = _written(self.limit, self.limit.allowed)
            return f"cannot be shown to hold: {self.why}; {allowed} allowed"
        measured, allowed = _written(self.limit, self.measured, self.limit.allowed)
        if not self.why:
            return f"{measured} measured, {allowed} allowed"
        if self.measured > self.limit.allowed:
            return f"at least {measured} measured, {allowed} allowed; {self.why}"
        return f"cannot be shown to hold: {self.why}; {measured} without, {allowed} allowed"

    def _amount(self, blame: Blame) -> str:
        if blame.amount is None or blame.share is None:
            return blame.why
        in_time = self.limit.table == "time"
        text = (
            readable_time(round(blame.amount)) if in_time else _written(self.limit, blame.amount)[0]
        )
        return f"{text} ({blame.share:.0%})"


def _written(limit: Limit, *amounts: int | float) -> list[str]:
    """Returns amounts in the limit's unit, with all digits where they would read the same."""
    if limit.table == "count":
        return [str(amount) for amount in amounts]
    if limit.name == "time.share":
        texts = [f"{amount:.1%}" for amount in amounts]
        exact = [f"{amount!r} of the step" for amount in amounts]
    elif limit.table == "time":
        texts = [readable_time(int(amount)) for amount in amounts]
        exact = [f"{amount} ps" for amount in amounts]
    else:
        texts = [readable_bytes(int(amount)) for amount in amounts]
        exact = [f"{amount} B" for amount in amounts]
    return texts if len(set(texts)) == len(set(amounts)) else exact
