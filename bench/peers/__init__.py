"""Other libraries' ranks on the same hosts, which take turns with jax.

`torch_ranks` and `mpi_ranks` are run by another interpreter, and import nothing of this project but
`serving`; `control` starts them and tells them what to do.
"""
