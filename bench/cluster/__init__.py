"""Hosts on one machine: a script on several of them, with links as slow as a real network's.

    python -m bench.cluster --hosts 2 --devices 4 --rate 200mbit -- python SCRIPT ARGS...

Each host is a network namespace with a link of its own to a bridge; both ends of the link are
limited to the host's rate. The script runs once on each host and joins the others with
`jax.distributed.initialize()`, without arguments: it finds what Slurm would have told it.
"""

from bench.cluster.launch import Settings as Settings
from bench.cluster.launch import run as run
