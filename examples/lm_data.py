"""The text that the example trains on: the source of Python's own standard library."""

from __future__ import annotations

import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
MAX_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on, and bytes of other files to check against."""

    train: np.ndarray
    held_out: np.ndarray


def stdlib_corpus() -> Corpus:
    """Reads the standard library; every tenth file, by a checksum of its name, is held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    total = 0
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if SKIPPED.isdisjoint(name.parts) and total < MAX_BYTES:
            text = path.read_bytes()
            total += len(text)
            parts[zlib.crc32(name.as_posix().encode()) % 10 == 0].append(text)
    return Corpus(*(np.frombuffer(b"".join(parts[held]), np.uint8) for held in (False, True)))


def windows(text: np.ndarray, batch: int, seq_len: int, seed: tuple[int, ...]) -> np.ndarray:
    """Draws ``int32[batch, seq_len + 1]`` windows of the text, the same in every process."""
    starts = np.random.default_rng(seed).integers(0, len(text) - seq_len - 1, batch)
    return text[starts[:, None] + np.arange(seq_len + 1)].astype(np.int32)


def place(tokens: np.ndarray, mesh: jax.sharding.Mesh) -> jax.Array:
    """Shards a batch over all axes of the mesh; each process hands over what is its own."""
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    return jax.make_array_from_callback(tokens.shape, sharding, lambda index: tokens[index])
