"""Payload dtypes, and where their numbers end."""

from __future__ import annotations

DTYPES = ("float32", "bfloat16", "float16")
"""Payload dtypes that codecs take."""

LARGEST = {
    "float32": float.fromhex("0x1.fffffep127"),
    "bfloat16": float.fromhex("0x1.fep127"),
    "float16": 65504.0,
}
"""The largest finite value of each dtype: decoded values are saturated to it."""

LIMIT = {
    "float32": float.fromhex("0x1.fffffep127"),
    "bfloat16": float.fromhex("0x1.fefffep127"),
    "float16": float.fromhex("0x1.ffdffep15"),
}
"""The largest float32 that rounds to a finite value of each dtype: a larger one is infinite in it.

Sums are float32 until they are encoded, so that such values come up.
"""
