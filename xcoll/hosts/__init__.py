"""Processes of one run: they meet before jax starts, and watch each other until the end."""

from xcoll.hosts.run import Hosts as Hosts
from xcoll.hosts.start import initialize as initialize
