"""Pallas kernels of compressed collectives, for TPU and GPU.

The package holds its place: it exports nothing yet. Every plan of `xcoll` is lowered to
operations of `jax.lax`, in full precision.
"""
