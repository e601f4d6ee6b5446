"""Benchmarks: scripts, and the cluster on one machine that they run on."""
