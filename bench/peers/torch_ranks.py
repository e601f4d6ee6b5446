"""One rank of torch.distributed with Gloo.

MASTER_ADDR=... MASTER_PORT=... python -m bench.peers.torch_ranks SOCKET RANK NUM_RANKS
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from bench.peers.serving import serve

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np


def prepare(
    collective: str, values: np.ndarray
) -> tuple[Callable[[bool], Any], Callable[[], np.ndarray]]:
    """Returns what runs a collective, and what returns its result."""
    num_ranks = dist.get_world_size()
    mine = torch.from_numpy(values)
    shares = {"psum_scatter": mine.numel() // num_ranks, "all_gather": mine.numel() * num_ranks}
    out = torch.empty(shares.get(collective, mine.numel()))

    def run(fresh: bool) -> None:
        if fresh:
            out.copy_(mine) if collective == "psum" else None  # it sums in place
        elif collective == "psum":
            dist.all_reduce(out)
        elif collective == "psum_scatter":
            dist.reduce_scatter_tensor(out, mine)
        elif collective == "all_gather":
            dist.all_gather_into_tensor(out, mine)
        else:
            dist.all_to_all_single(out, mine)

    return run, out.numpy


def main() -> None:
    """Joins the others, and serves until the other side closes."""
    path, rank, num_ranks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)  # as torchrun has it for several ranks on a host
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks)
    serve(path, rank, num_ranks, f"torch {torch.__version__}, Gloo", prepare)


if __name__ == "__main__":
    main()
