"""Collectives on slow links between hosts: xcoll beside jax.lax, PyTorch, MPI and the bound.

    python -m bench.wire [--cluster 2x4,4x2] [--rate 50mbit,200mbit,1gbit] [--json FILE]

Makes the hosts itself (`bench.cluster`), so it needs root and iproute2. On each cluster all
variants of a collective are checked against sums and moves in NumPy, and then timed in turn. The
whole grid takes about two hours, `--quick` three minutes.

Beside it run, where an interpreter has them, PyTorch (``--torch-python PATH``) and Open MPI with
mpi4py (``--mpi-python PATH``), as many ranks on each host as there are devices (`bench.peers`).
"""
