"""Eight virtual CPU devices for every test, whatever accelerator the machine has."""

import os
from collections import Counter

# Before jax is imported: with the aot extra, libtpu and the CUDA plugin are installed, and jax
# would look for their hardware first.
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds ``--every``."""
    parser.addoption(
        "--every",
        type=int,
        default=1,
        metavar="N",
        help="of each test's cases run the first, and every N-th after it (1: all)",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what ``--every`` does; every test keeps a case, and always the same ones."""
    every = config.getoption("--every")
    seen = Counter[str]()
    kept, left = [], []
    for item in items:
        name = item.nodeid.split("[")[0]
        (left if seen[name] % every else kept).append(item)
        seen[name] += 1
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept
