"""The collectives of a compiled program, one row each."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from xcoll.hlo.groups import Groups, Pairs, parse_groups, parse_lists, parse_transfer_target
from xcoll.hlo.loops import conditional, executions, slices
from xcoll.hlo.text import Instruction, Module, num_bytes, parse, program_text, shapes, walk

KINDS = (
    "all-reduce",
    "reduce-scatter",
    "all-gather",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
    "send",
    "recv",
    "custom-call",
)
"""The operations that move data between devices, without ``-start`` and ``-done``.

Of custom calls these are kernels that say that they communicate (Pallas kernels for TPU with remote
DMA); what they send is not in the program's text.
"""

_TRANSFERS = {
    "ALL_REDUCE": "all-reduce",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_GATHER": "all-gather",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective operation of a compiled program.

    Attributes:
      name: the instruction's.
      kind: one of `KINDS`. An all-reduce that the TPU compiler has fused with the slicing of its
        result, so that it is carried out as a reduce-scatter, is one.
      dtypes: of the operands, as HLO writes them (``"f32"``), each once.
      operand_bytes: bytes of all operands together, per device.
      operands: dtype and dimensions of each operand; several where operations were combined.
      groups: devices that exchange data with each other, each group in rank order; None for pairs.
      pairs: ``(source, destination)``, for permutes; None for groups.
      executions: how often it runs in one execution of the program; None where that depends on a
        loop whose trip count the text does not show.
      conditional: it runs only if a branch is taken; ``executions`` counts it as taken.
      slices: the TPU slices that run it, where not all do; else None.
      transfer: for a send or recv between TPU slices, the kind of collective that it carries out;
        else None.
      num_devices: devices that the program numbers. On several TPU slices a program numbers the
        devices of its own slice, and every slice runs the same.
      computation: name of the computation it stands in.
      op_name: the path of JAX's name stack, with `jax.named_scope`; empty where the compiler has
        kept none.
      unread: what could not be read of it, and why; then ``groups`` and ``pairs`` are None.

    ``groups`` and ``pairs`` are positions in ``mesh.devices.flat`` (on several TPU slices: in one
    slice's part of it); where ``transfer`` is not None, device ids.
    """

    name: str
    kind: str
    dtypes: tuple[str, ...]
    operand_bytes: int
    operands: tuple[tuple[str, tuple[int, ...]], ...]
    groups: Groups | None
    pairs: Pairs | None
    executions: int | None
    conditional: bool = False
    slices: tuple[int, ...] | None = None
    transfer: str | None = None
    num_devices: int
    computation: str
    op_name: str = ""
    unread: str = ""


def collectives(program: Any) -> tuple[Collective, ...]:
    """Returns every collective of a compiled program, in program order.

    A start and its done are one. An operation that the TPU compiler prints once for each step of
    its overlap with other work is one. A transfer between TPU slices is two: a send and a recv.

    Args:
      program: a compiled program (``jax.jit(f).lower(...).compile()``) or its ``as_text()``.

    Raises:
      TypeError: ``program`` is neither.
      ValueError: the text is not that of a compiled program.

    Example:
      >>> text = '''HloModule f, num_partitions=4
      ... ENTRY %main (x: f32[8]) -> f32[8] {
      ...   %x = f32[8]{0} parameter(0)
      ...   ROOT %r = f32[8]{0} all-reduce(%x), replica_groups=[2,2]<=[4], to_apply=%add
      ... }'''
      >>> [(c.kind, c.operand_bytes, c.groups) for c in collectives(text)]
      [('all-reduce', 32, ((0, 1), (2, 3)))]
    """
    return collectives_of(parse(program_text(program)))


def collectives_of(module: Module) -> tuple[Collective, ...]:
    """Returns every collective of a program that is parsed already."""
    counts, maybe, some_slices = executions(module), conditional(module), slices(module)
    scattered = _scattered(module)
    rows: list[Collective] = []
    seen: set[tuple[str, str, str]] = set()
    for computation, i in walk(module):
        kind = i.opcode.removesuffix("-start")
        if kind not in KINDS or (kind == "custom-call" and not _communicates(i)):
            continue
        if chain := re.search(r'chain_id="([^"]*)"', i.attributes):
            key = (kind, i.attribute("channel_id") or "", chain[1])
            if key in seen:
                continue
            seen.add(key)
        kind = "reduce-scatter" if computation.name in scattered else kind
        groups, pairs, transfer, unread = _connections(i, module.num_devices)
        operands = _operands(module, computation.name, i)
        rows.append(
            Collective(
                name=i.name,
                kind=kind,
                dtypes=tuple(dict.fromkeys(dtype for dtype, _ in operands)),
                operand_bytes=sum(num_bytes(dtype, dims) for dtype, dims in operands),
                operands=operands,
                groups=groups,
                pairs=pairs,
                executions=counts[computation.name],
                conditional=computation.name in maybe,
                slices=some_slices.get(computation.name),
                transfer=transfer,
                num_devices=module.num_devices,
                computation=computation.name,
                op_name=i.op_name,
                unread=unread,
            )
        )
    return tuple(rows)


def _communicates(i: Instruction) -> bool:
    """Whether a custom call is a Mosaic kernel with remote DMA."""
    return '"has_communication":true' in i.attributes


def _scattered(module: Module) -> frozenset[str]:
    """Returns the fused computations in which an all-reduce is carried out as a reduce-scatter."""
    return frozenset(
        callee
        for computation in module.computations.values()
        for i in computation.instructions.values()
        if i.opcode == "fusion" and "AllReduceScatterFusion" in i.attributes
        for key, callee in i.calls()
        if key == "calls"
    )


def _operands(
    module: Module, computation: str, i: Instruction
) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Returns dtype and dimensions of what a device hands over."""
    instructions = module.computations[computation].instructions
    names = i.operands
    kind = i.opcode.removesuffix("-start")
    if kind == "recv":  # its operand is a token: what arrives is what it has been handed
        return shapes(i.type)[:1]
    if kind in ("send", "ragged-all-to-all"):
        names = names[:1]
    if sizes := i.attribute("slice_sizes"):  # a permute of slices, in place
        dtype = shapes(instructions[names[0]].type)[0][0]
        return tuple((dtype, dims) for dims in parse_lists(sizes))
    return tuple(array for name in names for array in shapes(instructions[name].type))


def _connections(
    i: Instruction, num_devices: int
) -> tuple[Groups | None, Pairs | None, str | None, str]:
    """Returns groups or pairs, the kind of a transfer, and what of this could not be read."""
    try:
        return *_read_connections(i, num_devices), ""
    except (ValueError, KeyError) as error:
        return None, None, None, f"which devices it connects: {error}"


def _read_connections(
    i: Instruction, num_devices: int
) -> tuple[Groups | None, Pairs | None, str | None]:
    if target := i.attribute("_xla_megascale_target"):
        kind = i.attribute("_xla_megascale_transfer_type") or ""
        groups, pairs = parse_transfer_target(target)
        return groups, pairs, _TRANSFERS[kind.strip('"')]
    for key in ("source_target_pairs", "_xla_send_recv_source_target_pairs"):
        if found := i.attribute(key):
            return None, tuple((a, b) for a, b in parse_lists(found)), None
    if i.opcode in ("send", "recv"):
        return (), None, None
    if i.opcode == "custom-call":
        raise ValueError("a kernel that sends by itself does not show what, and to whom")
    return parse_groups(i.attribute("replica_groups") or "{}", num_devices), None, None
