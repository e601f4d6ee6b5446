"""One rank of MPI through mpi4py: ``mpirun ... python -m bench.peers.mpi_ranks SOCKET``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import mpi4py
import numpy as np
from mpi4py import MPI

from bench.peers.serving import serve

if TYPE_CHECKING:
    from collections.abc import Callable

COMM = MPI.COMM_WORLD


def prepare(
    collective: str, mine: np.ndarray
) -> tuple[Callable[[bool], Any], Callable[[], np.ndarray]]:
    """Returns what runs a collective, and what returns its result."""
    num_ranks = COMM.Get_size()
    shares = {"psum_scatter": mine.size // num_ranks, "all_gather": mine.size * num_ranks}
    out = np.empty(shares.get(collective, mine.size), np.float32)
    call = {
        "psum": COMM.Allreduce,
        "psum_scatter": COMM.Reduce_scatter_block,
        "all_gather": COMM.Allgather,
        "all_to_all": COMM.Alltoall,
    }[collective]

    def run(fresh: bool) -> None:
        if not fresh:
            call(mine, out)

    return run, lambda: out


def main() -> None:
    """Serves until the other side closes."""
    library = MPI.Get_library_version().partition(",")[0]
    about = f"{library}, mpi4py {mpi4py.__version__}"
    serve(sys.argv[1], COMM.Get_rank(), COMM.Get_size(), about, prepare)


if __name__ == "__main__":
    main()
