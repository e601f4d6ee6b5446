"""Meshes and collectives without a program, for the audit's arithmetic."""

import types

import numpy as np

from xcoll.hlo import Collective


def mesh(ids=None, **axes):
    """A mesh of devices that only have an id: by default their position."""
    shape = tuple(axes.values())
    ids = range(int(np.prod(shape))) if ids is None else ids
    devices = np.array([types.SimpleNamespace(id=i) for i in ids], object).reshape(shape)
    return types.SimpleNamespace(devices=devices, axis_names=tuple(axes), shape=axes)


def collective(kind, num_bytes, groups=None, pairs=None, num_devices=8, **more):
    """A row of the reader."""
    groups = None if groups is None else tuple(tuple(map(int, group)) for group in groups)
    pairs = None if pairs is None else tuple((int(a), int(b)) for a, b in pairs)
    return Collective(
        name="c",
        kind=kind,
        dtypes=("f32",),
        operand_bytes=num_bytes,
        operands=(("f32", (num_bytes // 4,)),),
        groups=groups,
        pairs=pairs,
        executions=more.pop("executions", 1),
        num_devices=num_devices,
        computation="main",
        **more,
    )
