"""Eight virtual CPU devices for every test, whatever accelerator the machine has."""

import os

# Before jax is imported: with the aot extra, libtpu and the CUDA plugin are installed, and jax
# would look for their hardware first.
os.environ["JAX_PLATFORMS"] = "cpu"

import jax

jax.config.update("jax_num_cpu_devices", 8)
