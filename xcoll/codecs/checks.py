"""What the options of codecs have to be."""

from __future__ import annotations

from xcoll_kernels import MAX_BLOCK

from xcoll.codecs.rounding import ROUNDINGS
from xcoll.errors import unknown


def check_block(call: str, block: object, *, multiple_of: int = 1) -> None:
    """Checks a block's number of elements.

    Raises:
      TypeError: ``block`` is not an integer.
      ValueError: it is not positive, too large for the kernels, or no multiple.
    """
    text = f"{call}(block={block!r})"
    if isinstance(block, bool) or not isinstance(block, int):
        raise TypeError(f"{text}: a block is an integer number of elements")
    if block < 1:
        raise ValueError(f"{text}: a block has at least {multiple_of} elements; try block=256")
    if block > MAX_BLOCK:
        raise ValueError(f"{text}: the kernels take blocks of at most {MAX_BLOCK} elements")
    if block % multiple_of:
        raise ValueError(
            f"{text}: two values share a byte, so a block has an even number of elements; try"
            f" block={block + 1}"
        )


def check_rounding(call: str, rounding: str) -> None:
    """Raises ValueError where ``rounding`` is unknown."""
    check_name(call, "rounding", rounding, ROUNDINGS)


def check_name(call: str, option: str, value: str, valid: tuple[str, ...]) -> None:
    """Raises ValueError where an option is none of its valid values, which are listed."""
    if value not in valid:
        raise ValueError(unknown(f"{call}({option}={value!r})", option, value, valid))
