"""`value_and_grad`: data-parallel gradients under jit, the rest left to the partitioner."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import source_info_util
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from xcoll import graphs
from xcoll.calls import Axes
from xcoll.errors import UnsupportedError, XcollWarning
from xcoll.gradients import arguments, auxiliary, averaging, batches
from xcoll.gradients.options import axis_names
from xcoll.names import GRADIENTS_SCOPE
from xcoll.policy import Policy
from xcoll.primitives import Region
from xcoll.topology import Topology
from xcoll.transform import Planned, checked


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    axis_name: Axes = ("dcn", "data"),
    policy: Policy | None = None,
    topology: Topology | str | None = None,
    in_axes: Any = 0,
    param_specs: Any = None,
    aux_op: Any = None,
) -> ValueAndGrad:
    """Returns a function of the loss and its gradients, as `jax.value_and_grad`, data-parallel.

    The batch is divided over the axes of ``axis_name``, which are manual (`jax.shard_map`); all
    other axes of the mesh stay with the partitioner, as under plain `jax.jit`. Each rank
    differentiates ``fun`` on its part of the batch, and the gradients are averaged by xcoll's plan:
    tensor parallelism from shardings, beside an int8 sum over the slow axis. For a loss that is a
    mean over examples, what comes out is what `jax.value_and_grad` gives of the whole batch; for a
    sum over them, the n-th part of it::

        value = 1/n sum over ranks of fun(params, part_r)      grads = d value / d params

    | by hand | here |
    | --- | --- |
    | ``jax.shard_map(body, axis_names={"dcn", "data"}, check_vma=False, ...)`` | ``axis_name`` |
    | ``in_specs`` of parameters and batch | ``argnums``: whole; others: divided, ``in_axes`` |
    | ``jax.value_and_grad(fun)`` in the body | the same, of any ``fun`` that jit takes |
    | ``with_sharding_constraint(grad, spec)``, so that a plan may cut it | ``param_specs`` |
    | ``xcoll.pmean(grads, axes, policy=...)`` | ``policy``, all gradients planned together |
    | ``jax.lax.pmean(loss, axes)``, and so on for aux | exact; ``aux_op`` |

    A parameter may be divided over axes of the partitioner. A plan that cuts its gradient has to
    know how, or the gradient is summed by XLA's own collective and the report says so. It is known
    from the type where axes are Explicit, from the array outside of `jax.jit`, and else from
    ``param_specs``: inside `jax.jit`, Auto axes do not show.

    Parameters divided over one of ``axis_name`` (FSDP) are an error where that is known, and
    gathered elsewhere: leave that axis to the partitioner, with ``axis_name="dcn"`` for example,
    and their gradients are divided as they are.

    ``fun`` may use collectives over ``axis_name``. A loss that divides by a number of its own, such
    as tokens that are not padding, is the whole batch's with that of all ranks:
    ``loss = total / jax.lax.pmean(count, axis_name)``. Keys are the same on all ranks;
    ``jax.random.fold_in(key, jax.lax.axis_index(axis_name))`` gives each rank its own. Its sharding
    constraints may name axes of the partitioner only.

    Call it inside one `jax.jit`. Outside, each call is traced and compiled anew.

    Args:
      fun: the loss: a function of pytrees to a real scalar, or to ``(scalar, aux)``. Arrays among
        its arguments are traced, everything else is closed over. Flax NNX modules are to be split:
        ``nnx.State`` is a pytree as any other.
      argnums: position or positions of the parameters: the arguments to differentiate, whole on
        every rank.
      has_aux: whether ``fun`` returns ``(scalar, aux)``.
      mesh: the mesh; None takes that of `jax.set_mesh`, or else of the arguments.
      axis_name: data-parallel axis, or a tuple of them, outermost first.
      policy: what xcoll may do with the sum of the gradients; None for the default, which is exact.
      topology: what the mesh lies on, as for `xcoll.optimize`.
      in_axes: which dimension of the other arguments is divided, as in `jax.vmap`: an integer for
        all, or a tuple with one entry an argument (None for ``argnums``), each an integer, None for
        what is the same on all ranks, or a pytree prefix of these. Keyword arguments are divided
        along the first. Scalars are the same on all ranks, and so is, where ``in_axes`` is no
        tuple, a key of two uint32.
      param_specs: a PartitionSpec (or NamedSharding) for each parameter, or a pytree prefix of
        them; a tuple of such if ``argnums`` is one.
      aux_op: what the whole batch's ``aux`` is: ``"mean"``, ``"sum"``, ``"max"``, ``"min"`` over
        ranks or ``"concatenate"`` along the first dimension; one for all, or a pytree prefix. For
        None the mean of float scalars; other leaves are an error, since what they are of the whole
        batch is not known.

    Returns:
      A function of the arguments of ``fun``, with ``reports``: a list with one `Report` per
      lowering. It returns ``(value, grads)``, or ``((value, aux), grads)``, all of the whole batch,
      and ``grads`` of the parameters' shapes, dtypes and specs. The mean is in the gradient's own
      dtype, in float32 for float16. ``holomorphic`` and ``allow_int`` of jax are not taken.

    Raises:
      ValueError: in a call, the batch does not divide over the ranks, an argument does not fit the
        options, a parameter is divided over ``axis_name``, or there is no mesh.
      UnknownAxisError: the mesh lacks an axis.
      UnsupportedError: an argument is a Flax NNX module, or the policy's codec rounds at random.
      TypeError: an option is of a wrong type, or what jax raises of ``fun``.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> mesh = jax.make_mesh((2, 2), ("data", "model"), (jax.sharding.AxisType.Auto,) * 2)
      >>> loss = lambda w, x: jnp.mean((x @ w) ** 2)
      >>> step = value_and_grad(loss, mesh=mesh, axis_name="data", param_specs=jax.P("model"))
      >>> value, grads = jax.jit(step)(jnp.ones(2), jnp.array([[1.0, 2.0], [3.0, 4.0]]))
      >>> print(value, grads)
      29.0 [24. 34.]
      >>> step.reports[-1].summary()
      '1 collective, 0 rewritten, 1 kept'
    """
    if not callable(fun):
        raise TypeError(
            f"value_and_grad(fun={fun!r}): must be a function, not {type(fun).__name__}"
        )
    if aux_op is not None and not has_aux:
        raise ValueError(f"value_and_grad(aux_op={aux_op!r}): has_aux is False; there is no aux")
    if mesh is not None and not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(f"value_and_grad(mesh={mesh!r}): must be a jax.sharding.Mesh")
    policy = checked("value_and_grad", policy, topology)
    random = [codec for codec in policy.codecs() if codec.needs_key]
    if random:
        raise UnsupportedError(
            f"value_and_grad(policy=...): {random[0]} rounds at random, and there is no key to draw"
            " from; use rounding='nearest', or gradients.sync with a compressor, which keeps one"
        )
    axes = axis_names("value_and_grad(axis_name", axis_name)
    return ValueAndGrad(
        fun, argnums, has_aux, mesh, axes, policy, topology, in_axes, param_specs, aux_op
    )


class ValueAndGrad(Planned):
    """What `value_and_grad` returns."""

    def __init__(
        self,
        fun: Callable[..., Any],
        argnums: int | Sequence[int],
        has_aux: bool,
        mesh: Mesh | AbstractMesh | None,
        axes: tuple[str, ...],
        policy: Policy,
        topology: Topology | str | None,
        in_axes: Any,
        param_specs: Any,
        aux_op: Any,
    ):
        super().__init__(fun, policy, topology)
        self._fun, self._argnums, self._has_aux = fun, argnums, has_aux
        self._mesh, self._axes = mesh, axes
        self._in_axes, self._param_specs, self._aux_op = in_axes, param_specs, aux_op

    def __repr__(self) -> str:
        name = getattr(self._fun, "__qualname__", self._fun)
        return f"xcoll.gradients.value_and_grad({name})"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the loss and the gradients of the whole batch, as `jax.value_and_grad`."""
        if not isinstance(graphs.split((args, kwargs)), graphs.Plain):
            raise UnsupportedError(
                "value_and_grad: an argument is a Flax NNX module, whose state a traced call would"
                " change on a copy; split it: graph, params, rest = nnx.split(model, nnx.Param,"
                " ...), give params and rest, and nnx.merge(graph, params, rest, copy=True) in fun"
            )
        positions = arguments.positions_of(self._argnums, len(args))
        mesh = arguments.mesh_of(self._mesh, (args, kwargs), self._axes)
        params = tuple(args[i] for i in positions)
        is_tuple = not isinstance(self._argnums, int | np.integer)
        cuts = arguments.param_cuts(params, self._param_specs, is_tuple, self._axes, mesh)
        self._warn_of_unknown(cuts, mesh)
        rest = ([None if i in positions else arg for i, arg in enumerate(args)], kwargs)
        specs = batches.batch_specs(
            self._fun, args, kwargs, positions, self._in_axes, self._axes, mesh
        )
        leaves, structure = jax.tree.flatten(rest)
        traced = {i: spec for i, spec in enumerate(specs) if spec is not None}
        batch = [batches.placed(leaves[i], spec, self._axes, mesh) for i, spec in traced.items()]
        # Beside axes of the partitioner XLA refuses a sum over axes of one rank only.
        ranks = tuple(axis for axis in self._axes if mesh.shape[axis] > 1)
        region = Region(self.policy, self.topology, sink=self.reports.append)
        # Tracing the body forgets it, and the report shall name the line.
        caller = source_info_util.current().traceback
        aux_tree: Any = None

        def on_ranks(params: tuple[Any, ...], batch: list[Any]) -> Any:
            nonlocal aux_tree
            inside = list(leaves)
            for i, part in zip(traced, batch, strict=True):
                inside[i] = part
            own, keywords = jax.tree.unflatten(structure, inside)
            for i, value in zip(positions, params, strict=True):
                own[i] = value
            out, grads = jax.value_and_grad(self._fun, self._argnums, self._has_aux)(
                *own, **keywords
            )
            value, aux = out if self._has_aux else (out, ())
            aux_tree = jax.tree.structure(aux)
            names = source_info_util.current_name_stack()
            own_names = jax.named_scope(GRADIENTS_SCOPE)
            with source_info_util.user_context(caller, name_stack=names), own_names:
                same, rows = auxiliary.combine("value_and_grad", aux, self._aux_op, ranks)
                value = auxiliary.reduce("mean", value, ranks)
                grads = averaging.mean(grads, cuts, ranks, region)
            return value, grads, same, rows

        whole, split = PartitionSpec(), PartitionSpec(self._axes)
        run = jax.shard_map(
            on_ranks,
            mesh=mesh,
            in_specs=(whole, list(traced.values())),
            out_specs=(whole, whole, whole, split),
            axis_names=set(self._axes),
            # So that fun may be any function: with types of varying axes, a scan whose carry
            # starts as zeros is an error.
            check_vma=False,
        )
        # Called outside of a program, it would else be run operation by operation.
        value, grads, same, rows = jax.jit(run)(params, batch)
        if not self._has_aux:
            return value, grads
        aux = jax.tree.unflatten(aux_tree, auxiliary.merge(same, rows))
        return (value, aux), grads

    def _warn_of_unknown(self, cuts: Sequence[PartitionSpec | None], mesh: Any) -> None:
        unknown = sum(cut is None for cut in cuts)
        kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
        auto = [a for a, kind in kinds if kind == AxisType.Auto and a not in self._axes]
        left = [a for a in auto if mesh.shape[a] > 1]
        if unknown and left and self.policy.is_lossy:
            warnings.warn(
                f"{self!r}: how {unknown} of {len(cuts)} parameters are divided over"
                f" {', '.join(left)} is not known inside jax.jit, and their gradients are summed"
                " exactly; pass param_specs= (PartitionSpecs of the parameters), or use a mesh of"
                " Explicit axes",
                XcollWarning,
                stacklevel=3,
            )
