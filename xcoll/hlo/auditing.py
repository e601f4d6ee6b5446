"""`audit`: every collective of a compiled program, with what it sends, takes and comes from."""

from __future__ import annotations

import reprlib
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from xcoll import aot
from xcoll.hlo.advice import advise
from xcoll.hlo.frames import Frames
from xcoll.hlo.loops import executions
from xcoll.hlo.origins import Origins
from xcoll.hlo.overlap import Overlap, overlaps
from xcoll.hlo.prices import Network
from xcoll.hlo.reader import Collective, collectives_of
from xcoll.hlo.result import Audit
from xcoll.hlo.rows import Row
from xcoll.hlo.spans import spans
from xcoll.hlo.text import parse, program_text
from xcoll.hlo.timeline import events_of
from xcoll.hlo.work import compute_of
from xcoll.hlo.written import WrittenProgram
from xcoll.memory import memory_of
from xcoll.meshes import check_topology, topology_of
from xcoll.topology import Topology

PS = 1e-12


def audit(
    fn_or_compiled: Any,
    *args: Any,
    mesh: Mesh | None = None,
    topology: Topology | str | None = None,
    **kwargs: Any,
) -> Audit:
    """Returns every collective of a compiled program: those you wrote, and those you did not.

    Under `jax.jit` with shardings the partitioner inserts collectives that no one wrote, and
    differentiation inserts more. Here is each of them: over which mesh axes, how many bytes, how
    long it should take and how much of that the device waits, from which line, and who made it.
    What could not be read of one is said in its row; none is left out.

    Nothing runs. A function is compiled for the devices of its arguments' shardings, which may be
    those of hardware that is not there (`xcoll.aot.mesh`).

    Args:
      fn_or_compiled: a function, jitted or not; or what `jax.jit(f).lower(...)` or its
        ``.compile()`` or `xcoll.aot.compile` returned; or the text of that (``.as_text()``), with
        ``mesh``.
      *args: arguments of the function; `jax.ShapeDtypeStruct` with shardings will do. None for a
        compiled program.
      mesh: the mesh that the program is for. None takes that of the arguments' shardings. A
        function is traced under it (`jax.set_mesh`).
      topology: what the mesh lies on: a `Topology`, its text (such as ``"2*cpu:4@200Mbit"``, read
        against the mesh), or None to read it off the devices. Where it is not known, times are
        None.
      **kwargs: keyword arguments of the function.

    Returns:
      The audit. Print it; ``.rows``, ``.wire_bytes``, ``.exposed_s`` and ``.to_json()`` hold the
      same for programs, ``.timeline(path)`` writes it for Perfetto.

    Raises:
      TypeError: ``fn_or_compiled``, ``mesh`` or ``topology`` is of a wrong type, or arguments are
        given with a compiled program.
      ValueError: the mesh is not known, or does not match the program or the topology.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> P = jax.sharding.PartitionSpec
      >>> mesh = jax.sharding.Mesh(jax.devices()[:4], ("data",))
      >>> x = jax.device_put(jnp.ones((8, 4)), jax.NamedSharding(mesh, P("data")))
      >>> found = audit(lambda x: x.mean(), x)
      >>> [(row.kind, row.axes, row.num_bytes, row.made_by) for row in found.rows]
      [('all-reduce', ('data',), 4, 'partitioner')]
    """
    if mesh is not None and not isinstance(mesh, Mesh):
        raise TypeError(
            f"audit(mesh={mesh!r}): must be a jax.sharding.Mesh with its devices, or None"
        )
    check_topology("audit", topology)
    lowered, compiled = _compiled(fn_or_compiled, args, kwargs, mesh)
    mesh = _mesh_of(compiled, args, kwargs) if mesh is None else mesh
    lies_on = topology_of("audit", topology, mesh, dict(mesh.shape))
    return audit_program(compiled, mesh, lies_on, lowered)


def audit_program(
    compiled: Any, mesh: Mesh, topology: Topology, lowered: jax.stages.Lowered | None = None
) -> Audit:
    """Returns the audit of a compiled program, or of its text, on a mesh with a topology.

    Args:
      compiled: the program.
      mesh: the mesh that it is for.
      topology: what the mesh lies on.
      lowered: the program before compilation, which says more of where its collectives come from.
    """
    text = program_text(compiled)
    module = parse(text)
    counts = executions(module)
    found = collectives_of(module)
    network = Network(mesh, topology)
    analysis = getattr(compiled, "cost_analysis", lambda: None)()
    compute = compute_of(module, counts, topology.device, analysis)
    prices = {c.name: None if c.unread else network.time_ps(c) for c in found}
    times_s = {name: time_ps * PS for name, time_ps in prices.items() if time_ps is not None}
    placed = spans(module, found)
    overlap = overlaps(module, found, placed, compute, times_s)
    num_axes = sum(size > 1 for size in mesh.shape.values())
    written = None if lowered is None else lambda: WrittenProgram(lowered, num_axes)
    origins = Origins(module, Frames(text), written)
    is_timed = compute.time_s is not None
    rows = tuple(
        _row(c, network, times_s.get(c.name), overlap[c.name], is_timed, origins) for c in found
    )
    return Audit(
        rows=rows,
        axis_sizes=dict(mesh.shape),
        topology=str(topology),
        wire_bytes=network.total_wire_bytes(found),
        level_bytes=network.total_level_bytes(found),
        compute_s=compute.time_s,
        compute_source=compute.source,
        memory=memory_of(compiled) if isinstance(compiled, jax.stages.Compiled) else None,
        advice=advise(module, rows, found, topology, dict(mesh.shape)),
        events=events_of(module, rows, placed, compute),
    )


def _row(
    c: Collective,
    network: Network,
    time_s: float | None,
    overlap: Overlap,
    is_timed: bool,
    origins: Origins,
) -> Row:
    origin = origins.of(c)
    unread = c.unread
    axes: tuple[str, ...] | None = None
    wire: dict[str, int] = {}
    levels: dict[str, int] = {}
    bound_ps: int | None = None
    if not unread:
        axes = network.axes_of(c)
        wire, levels = network.wire_bytes(c), network.level_bytes(c)
        bound_ps = network.bound_ps(c)
    # Beside computation of unknown length an unknown part is hidden.
    is_known = time_s is not None and (is_timed or not overlap.is_async)
    hidden_s = min(time_s, overlap.work_s) if is_known and time_s is not None else None
    return Row(
        name=c.name,
        kind=c.kind,
        dtypes=c.dtypes,
        num_bytes=c.operand_bytes,
        operands=c.operands,
        axes=axes,
        num_ranks=_num_ranks(c),
        executions=c.executions,
        conditional=c.conditional,
        transfer=c.transfer,
        wire_bytes=wire,
        level_bytes=levels,
        time_s=time_s,
        bound_s=None if bound_ps is None else bound_ps * PS,
        is_async=overlap.is_async,
        hidden_s=hidden_s,
        exposed_s=None if time_s is None or hidden_s is None else time_s - hidden_s,
        source=origin.source,
        is_near=origin.is_near,
        made_by=origin.made_by,
        computation=c.computation,
        op_name=origin.op_name,
        unread=unread,
    )


def _num_ranks(c: Collective) -> int:
    if c.pairs is not None:
        return len({rank for pair in c.pairs for rank in pair})
    return max(map(len, c.groups or ()), default=1)


def _compiled(fn: Any, args: Any, kwargs: Any, mesh: Mesh | None) -> tuple[Any, Any]:
    """Returns the program before compilation, None where that is not at hand, and after it."""
    fn = fn.compiled if isinstance(fn, aot.Program) else fn
    if isinstance(fn, jax.stages.Compiled | jax.stages.Lowered | str):
        if args or kwargs:
            raise TypeError(
                f"audit({type(fn).__name__}, ...): a program that is lowered or compiled has its"
                " arguments; leave them out"
            )
        return (fn, fn.compile()) if isinstance(fn, jax.stages.Lowered) else (None, fn)
    if not callable(fn):
        raise TypeError(
            f"audit(fn_or_compiled={reprlib.repr(fn)}): must be a function, or what"
            f" jax.jit(f).lower(...) or its .compile() returned, not {type(fn).__name__}"
        )
    lowered = aot.lower(fn, args, kwargs, mesh)
    return lowered, lowered.compile()


def _mesh_of(compiled: Any, args: Any, kwargs: Any) -> Mesh:
    """Returns the mesh of a program's shardings, or of its arguments'."""
    shardings: list[Any] = [leaf.sharding for leaf in _arrays((args, kwargs))]
    if isinstance(compiled, jax.stages.Compiled):
        shardings += jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    for sharding in shardings:
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            return sharding.mesh
    raise ValueError(
        "audit: no argument has a sharding over a mesh, so that it is not known which mesh the"
        " program is for; pass mesh=, or arguments with a jax.sharding.NamedSharding"
    )


def _arrays(tree: Any) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf, "sharding")]
