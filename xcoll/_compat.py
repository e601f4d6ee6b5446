"""Every departure from JAX's public interface, and the only file that imports ``jax._src``.

Each function says what it stands for, so that it can be replaced once a public form exists.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.experimental.layout import Format
from jax.interpreters import mlir


def compile_only_gpu_devices(target_config: str, topology: str) -> list[Any]:
    """Makes GPU devices that can only be compiled for.

    The public `jax.experimental.topologies.get_topology_desc` passes no target configuration on
    in a way the CUDA plug-in accepts.

    Args:
      target_config: XLA's text proto ``GpuTargetConfigProto``.
      topology: ``"slices x hosts x devices"``, for example ``"1x2x8"``.
    """
    from jax._src import xla_bridge

    description = xla_bridge.make_pjrt_topology(
        "cuda", "", target_config=target_config, topology=topology
    )
    return list(description._make_compile_only_devices())


def key_value_client() -> Any | None:
    """Returns the key-value store of `jax.distributed`, or None before it is initialised.

    There is no public access to the store.
    """
    from jax._src import distributed

    return distributed.global_state.client


def key_value_wait(client: Any, place: str, timeout_s: float) -> str | None:
    """Returns the text at a place of the key-value store, or None if it is not there in time."""
    try:
        return str(client.blocking_key_value_get(place, int(1000 * timeout_s)))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" in str(error):
            return None
        raise


def key_value_look(client: Any, place: str) -> str | None:
    """Returns the text at a place of the key-value store, or None if there is none now."""
    try:
        return str(client.key_value_try_get(place))
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" in str(error):
            return None
        raise


def distributed_parameters(
    coordinator_address: str | None,
    num_processes: int | None,
    process_id: int | None,
    local_device_ids: Any,
    cluster_detection_method: str | None,
    initialization_timeout: int,
) -> tuple[str | None, int | None, int | None, Any]:
    """Returns what `jax.distributed.initialize` would take for the arguments that are None.

    It looks at the environment and asks cluster managers; no public function says what it found.
    """
    from jax._src import clusters

    address = coordinator_address or os.environ.get("JAX_COORDINATOR_ADDRESS")
    if isinstance(local_device_ids, int):
        local_device_ids = [local_device_ids]
    if local_device_ids is None and (ids := os.environ.get("JAX_LOCAL_DEVICE_IDS")):
        local_device_ids = [int(number) for number in ids.split(",")]
    found = (address, num_processes, process_id, local_device_ids)
    if cluster_detection_method == "deactivate" or None not in found:
        return found
    return clusters.ClusterEnv.auto_detect_unset_distributed_params(
        *found, cluster_detection_method, initialization_timeout
    )


def set_coordinator_address(address: str) -> None:
    """Says where the coordinator is, once jax is connected to a relay of it."""
    from jax._src import distributed

    distributed.global_state.coordinator_address = address


_abandoned: list[Any] = []


def abandon_distributed() -> None:
    """Lets go of jax's client and service without a word to the other processes.

    `jax.distributed.shutdown` waits for all of them, and ends this process if one does not come; so
    do the destructors, which is why what is let go of is kept until the process ends.
    """
    import ctypes

    from jax._src import distributed

    state = distributed.global_state
    for held in (state.preemption_sync_manager, state.client, state.service):
        if held is not None:
            _abandoned.append(held)
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
    state.preemption_sync_manager = state.client = state.service = None


def gloo_addresses(client: Any) -> bytes:
    """Returns what Gloo's contexts say of where they are reached, one after the other.

    The key-value store has them, in Gloo's own format; socket addresses stand in it as the kernel
    writes them.
    """
    return b"".join(value for _, value in client.key_value_dir_get_bytes("cpu:gloo/"))


def check_vma(enabled: bool) -> contextlib.AbstractContextManager[None]:
    """Switches the check of varying manual axes on or off while tracing.

    `jax.shard_map(check_vma=)` sets the same state for its body.
    """
    from jax._src import config

    return config._check_vma(enabled)


def without_manual_type(aval: Any) -> Any:
    """Returns ``aval`` as it is typed where varying axes are not checked."""
    return aval.update(manual_axis_type=type(aval.mat)())


def varying_axes(aval: Any) -> frozenset[str]:
    """Returns the manual axes that a value of this type varies over."""
    return aval.mat.varying


def source_line(eqn: Any) -> str | None:
    """Returns ``file:line`` of the user's code that made an equation, if it is known.

    Frames of this package are passed over, so that `xcoll.psum` points at its caller.
    """
    return _user_line(eqn.source_info.traceback)


def lowering_source(lowering_context: Any) -> str | None:
    """Returns ``file:line`` of the user's code whose equation is being lowered, if it is known."""
    return _user_line(lowering_context.traceback)


def _user_line(traceback: Any) -> str | None:
    from jax._src import source_info_util

    for frame in source_info_util.user_frames(traceback) if traceback else ():
        if is_users(frame.file_name):
            return f"{frame.file_name}:{frame.start_line}"
    return None


_LIBRARIES = ("xcoll", "xcoll_kernels", "optax", "flax", "jax", "jaxlib")
_INSTALLED = re.compile(rf"[/\\](?:site|dist)-packages[/\\](?:{'|'.join(_LIBRARIES)})[/\\]")


def is_users(file_name: str) -> bool:
    """Whether a frame's file is the user's own, and not of the libraries in between."""
    imported = (_directory(module) for module in _LIBRARIES if module in sys.modules)
    return not _INSTALLED.search(file_name) and not file_name.startswith(tuple(imported))


@functools.cache
def _directory(module: str) -> str:
    """Returns where a library's files are: its frames stand between the user's call and ours."""
    return os.path.dirname(os.path.abspath(sys.modules[module].__file__ or "")) + os.sep


def is_jitted(fn: Any) -> bool:
    """Returns whether `jit_options` can read how a function was jitted (by `jax.jit` itself)."""
    # What wraps a jitted function (`jax.shard_map` does) has its attributes, but not its type.
    return isinstance(fn, type(jax.jit(lambda: None))) and hasattr(fn, "_jit_info")


def register_in_checkify(call_primitive: Any) -> None:
    """Lets `jax.experimental.checkify` go into the body of a call primitive."""
    from jax._src import checkify
    from jax._src.interpreters import partial_eval

    checkify.error_checks[call_primitive] = checkify.error_checks[partial_eval.eval_jaxpr_p]


def edit_made_jaxpr(thunk: Any, edit: Callable[[Any, tuple[bool, ...]], Any]) -> Any:
    """Returns a custom derivative's deferred trace that is edited once it is made.

    Args:
      thunk: the parameter ``fwd_jaxpr_thunk`` or ``jvp_jaxpr_fun`` of a custom-derivative equation.
      edit: gets the traced program and what the trace was asked for: which inputs (``fwd``) or
        tangents (``jvp``) are zero, respectively not.
    """
    from jax._src import linear_util

    def traced(*asked: bool) -> Any:
        jaxpr, *others = thunk.call_wrapped(*asked)
        return edit(jaxpr, asked), *others

    return linear_util.wrap_init(traced, debug_info=thunk.debug_info)


def manual_context(lowering_context: Any) -> tuple[Any, frozenset[str], tuple[Any, ...] | None]:
    """Returns the mesh, its manual axes and the devices that a lowering is for.

    The mesh is a `Mesh`, an `AbstractMesh` or None; outside a manual computation no axis is manual.
    The devices are None where a program is exported, or lowered for no device in particular.
    """
    context = lowering_context.module_context.axis_context
    if isinstance(context, mlir.SPMDAxisContext):
        mesh: Any = context.mesh
        devices = getattr(mesh, "_flat_devices_tuple", None)
        return mesh, frozenset(context.manual_axes or mesh.axis_names), devices
    mesh = getattr(context, "abstract_mesh", None)
    return mesh, frozenset(), getattr(context, "device_assignment", None)


def lax_primitive(name: str) -> Any:
    """Returns jax.lax's collective primitive of that name, or None where this jax has none."""
    from jax._src.lax import parallel

    return getattr(parallel, f"{name}_p", None)


def checks_vma() -> bool:
    """Returns whether varying-axes types are checked where tracing is now."""
    from jax._src import config

    return bool(config._check_vma.value)


def bound_axes() -> tuple[Any, ...]:
    """Returns the axis names that a collective may use here, those of vmap included.

    The public form is named ``unsafe_get_axis_names_DO_NOT_USE``.
    """
    from jax._src import core

    return tuple(core.get_axis_env().axis_names())


def named_axis_effects(axes: Iterable[Any]) -> set[Any]:
    """Returns the effects of an operation that uses the named axes, as jax.lax's collectives have.

    There is no public name for the class.
    """
    from jax._src import core

    return {core.NamedAxisEffect(axis) for axis in axes}


def lower_all_reduce(ctx: Any, x: Any, combine: Any, *, axes: tuple[Any, ...]) -> Any:
    """Lowers an all-reduce that combines with any binary primitive, e.g. ``lax.mul_p``.

    jax.lax offers sum, max and min only; StableHLO takes any.
    """
    from jax._src.lax import parallel

    return parallel._all_reduce_lowering(combine, None, ctx, x, axes=axes, axis_index_groups=None)


def lower_unchecked(
    fun: Callable[..., Any], *, multiple_results: bool = False
) -> Callable[..., Any]:
    """Returns a lowering rule that traces ``fun`` with varying-axes types switched off.

    Inside a lowering the types have done their work, and checking them again would refuse loop
    carries that start as constants.
    """
    lower = mlir.lower_fun(fun, multiple_results=multiple_results)

    def rule(ctx: Any, *args: Any, **params: Any) -> Any:
        avals = [without_manual_type(aval) for aval in ctx.avals_in]
        with check_vma(False):
            return lower(ctx.replace(avals_in=avals), *args, **params)

    return rule


def lowering_platform(lowering_context: Any) -> str:
    """Returns the platform a program is lowered for: ``"cpu"``, ``"tpu"`` or ``"gpu"``."""
    platforms = lowering_context.platforms or lowering_context.module_context.platforms
    return "gpu" if platforms[0] in ("cuda", "rocm", "gpu") else str(platforms[0])


# fmt: off
_LOWERED_ELEMENTWISE = frozenset(f"stablehlo.{name}" for name in (
    "abs", "add", "and", "cbrt", "ceil", "clamp", "convert", "cosine", "divide", "exponential",
    "exponential_minus_one", "floor", "log", "log_plus_one", "logistic", "maximum", "minimum",
    "multiply", "negate", "not", "or", "power", "reduce_precision", "remainder",
    "round_nearest_even", "rsqrt", "select", "sign", "sine", "sqrt", "subtract", "tanh", "xor",
))
# fmt: on


def lowered_cut(value: Any) -> tuple[tuple[str, ...], ...] | None:
    """Returns the mesh axes that each dimension of a lowered value is divided over, if it is known.

    Known is what `jax.lax.with_sharding_constraint` made in the same function, and what was made of
    it element by element. A jaxpr does not say it of values that come from outside of it.
    """
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import sdy

    done: dict[Any, Any] = {}

    def cut(value: Any, depth: int) -> Any:
        if value not in done:
            done[value] = step(value, depth) if depth < 200 else None
        return done[value]

    def step(value: Any, depth: int) -> Any:
        op = value.owner
        if not isinstance(op, ir.OpView | ir.Operation):
            return None  # The argument of a function.
        if op.name == "sdy.sharding_constraint":
            dimensions = sdy.TensorShardingAttr(op.attributes["sharding"]).dimension_shardings
            parsed = [sdy.DimensionShardingAttr(d) for d in dimensions]
            axes = [[sdy.AxisRefAttr(axis) for axis in d.axes] for d in parsed]
            if not all(d.is_closed for d in parsed):
                return (
                    None if any(axes) else cut(op.operands[0], depth + 1)
                )  # Open: it says nothing.
            if any(axis.sub_axis_info is not None for names in axes for axis in names):
                return None
            return tuple(tuple(axis.name for axis in names) for names in axes)
        if op.name not in _LOWERED_ELEMENTWISE:
            return None
        shape = value.type.shape
        cuts = {cut(v, depth + 1) for v in op.operands if v.type.shape == shape} - {None}
        return cuts.pop() if len(cuts) == 1 else None

    return cut(value, 0) if isinstance(value, ir.Value) else None


def jit_options(fn: Any) -> dict[str, Any]:
    """Returns the arguments that made a jitted function, to give to `jax.jit` once more."""
    info = fn._jit_info
    options: dict[str, Any] = {
        "static_argnums": info.static_argnums,
        "static_argnames": info.static_argnames,
        "donate_argnums": info.donate_argnums,
        "donate_argnames": info.donate_argnames,
        "keep_unused": info.keep_unused,
        "device": info.device,
        "backend": info.backend,
        "inline": info.inline,
        "compiler_options": dict(info.compiler_options_kvs) or None,
    }
    for side in ("in", "out"):
        shardings = getattr(info, f"{side}_shardings_leaves")
        layouts = getattr(info, f"{side}_layouts_leaves")
        if all(type(s).__name__ == "UnspecifiedValue" for s in shardings) and not any(layouts):
            continue
        leaves = [
            Format(layout, sharding) if layout is not None else sharding
            for sharding, layout in zip(shardings, layouts, strict=True)
        ]
        tree = getattr(info, f"{side}_shardings_treedef")
        options[f"{side}_shardings"] = jax.tree.unflatten(tree, leaves)
    return options
