"""A rank's side: waits for what to do, does it, says how long it took.

Run by interpreters that lack this project: the standard library, NumPy, and Python 3.9 or newer.
"""

from __future__ import annotations

import json
import socket
import time
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    Run = Callable[[bool], Any]
    Prepare = Callable[[str, np.ndarray], tuple[Run, Callable[[], np.ndarray]]]

UNIT_ROUNDOFF = 2.0**-24


def payload_of(rank: int, num_elements: int) -> np.ndarray:
    """Returns what a rank puts in: float32, normally distributed, of the rank's own seed."""
    return np.random.default_rng(rank).standard_normal(num_elements, dtype=np.float32)


def exact(
    collective: str, rank: int, num_ranks: int, num_elements: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns what a rank has to get, and the largest error that order of summation explains."""
    inputs = [payload_of(r, num_elements) for r in range(num_ranks)]
    if collective in ("psum", "psum_scatter"):
        total, magnitude = np.zeros(num_elements), np.zeros(num_elements)
        for x in inputs:
            total += x
            magnitude += np.abs(x)
        limit = num_ranks * UNIT_ROUNDOFF * magnitude
        if collective == "psum":
            return total, limit
        return np.split(total, num_ranks)[rank], np.split(limit, num_ranks)[rank]
    if collective == "all_to_all":
        inputs = [np.split(x, num_ranks)[rank] for x in inputs]
    moved = np.concatenate(inputs)
    return moved, np.zeros(moved.size)


def serve(path: str, rank: int, num_ranks: int, about: str, prepare: Prepare) -> None:
    """Does what comes over a socket until it is closed.

    Args:
      path: of the socket.
      rank: this one.
      num_ranks: all of them.
      about: the library and its version, for the table.
      prepare: of a collective's name and the rank's float32 input, returns two functions: one that
        runs it once, or, given True, puts back what a run overwrites; and one that returns the
        result.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(path)
        lines = connection.makefile("r")
        say(connection, {"rank": rank, "about": about})
        run: Run | None = None
        for line in lines:
            asked = json.loads(line)
            if asked["do"] == "prepare":
                run, answer = prepared(asked, rank, num_ranks, prepare)
            else:
                assert run is not None
                answer = timed(run, asked["calls"])
            say(connection, answer)


def prepared(
    asked: dict[str, Any], rank: int, num_ranks: int, prepare: Prepare
) -> tuple[Run | None, dict[str, Any]]:
    """Runs a collective once and checks what it returns."""
    collective, elements = asked["collective"], asked["elements"]
    try:
        run, result = prepare(collective, payload_of(rank, elements))
        run(True)
        run(False)
        got = result()
    except (NotImplementedError, RuntimeError, ValueError, AttributeError) as error:
        return None, {"missing": f"{type(error).__name__}: {error}"}
    wanted, limit = exact(collective, rank, num_ranks, elements)
    if got.shape != wanted.shape or not (np.abs(got - wanted) <= limit).all():
        return None, {"wrong": f"rank {rank}: {collective} of {elements} elements is wrong"}
    return run, {}


def timed(run: Run, calls: int) -> dict[str, Any]:
    """Returns start and end of so many runs."""
    run(True)
    start = time.monotonic()
    for _ in range(calls):
        run(False)
    return {"start_s": start, "end_s": time.monotonic()}


def say(connection: socket.socket, what: dict[str, Any]) -> None:
    """Sends one line."""
    connection.sendall((json.dumps(what) + "\n").encode())
