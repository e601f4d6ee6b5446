"""Marks: which collectives a traced program has itself, and which differentiation adds later.

A lossy policy treats the two apart. They cannot be told apart when a program is lowered, so the
program is marked when it is traced: an identity stands before the operand of each collective.
Differentiation from outside keeps it there for what is computed again, and has none for
tangents and cotangents, since the derivative of a mark is the identity without a mark::

    d(mark(x)) = dx        markᵀ(ct) = ct

A mark lowers to its operand, so that the compiled program is the same. It can also hold a
PRNG key, for codecs that round at random.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe

from xcoll import _compat
from xcoll.barriers import barrier_p
from xcoll.sites import OPAQUE, REGION, read

mark_p = core.Primitive("xcoll_mark")
"""Identity on its first operand; a second one, if any, is the key."""

# fmt: off
_PASSED = frozenset({
    "broadcast_in_dim", "convert_element_type", "copy", "pvary", "reduce_sum", "reshape", "squeeze",
    "transpose",
})
"""Steps that jax puts between a mark and its collective: casts of types, vmap's changes of shape.
None of them makes a tangent of a value that is none."""
# fmt: on


@dataclass(frozen=True)
class Mark:
    """What is known of a marked operand.

    Attributes:
      key: the variable of its PRNG key, or None.
    """

    key: Any = None


def keyed(x: Any, key: jax.Array) -> Any:
    """Returns the leaves of ``x``, each marked with a key of its own.

    Args:
      x: pytree of arrays.
      key: a typed scalar PRNG key (see `check_key`). The first leaf of several gets what
        `jax.random.fold_in` makes of it and 0, and so on; a single leaf gets it as it is.

    Returns:
      A pytree of the same values and types.
    """
    leaves, tree = jax.tree.flatten(x)
    keys = [key] if len(leaves) == 1 else [jax.random.fold_in(key, i) for i in range(len(leaves))]
    marked = [mark_p.bind(jnp.asarray(v), k) for v, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(tree, marked)


def check_key(call: str, key: Any) -> jax.Array:
    """Returns ``key`` as a typed scalar PRNG key.

    Args:
      call: the public function, for the message.
      key: ``jax.random.key(seed)``, or the two uint32 of ``jax.random.PRNGKey(seed)``.

    Raises:
      TypeError: it is neither.

    Example:
      >>> check_key("psum", jax.random.PRNGKey(0)).dtype == jax.random.key(0).dtype
      True
    """
    dtype, shape = getattr(key, "dtype", None), getattr(key, "shape", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key) and shape == ():
        return key
    if dtype == jnp.uint32 and shape == (2,):
        return jax.random.wrap_key_data(key, impl="threefry2x32")
    what = repr(key) if dtype is None else f"an array of dtype {dtype} and shape {shape}"
    raise TypeError(
        f"{call}(key=...): {what} is no PRNG key; pass one key, as jax.random.key(seed) makes it"
        " (one of those that jax.random.split returns, not all)"
    )


def insert(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """Returns ``jaxpr`` with a mark before the first operand of every collective.

    The bodies of its equations are marked too; those of inner regions are not, which have a policy
    of their own. What a custom derivative computes again of the function itself is marked when
    it is traced. Products over ranks have no mark: no codec takes them. Collectives of one operand
    share a mark, so that they still travel once.

    Args:
      jaxpr: a traced program, before it is differentiated from outside.
    """
    return _Inserter().run(jaxpr)


@dataclass
class _Inserter:
    done: dict[int, core.Jaxpr] = field(default_factory=dict)
    alive: list[core.Jaxpr] = field(default_factory=list)

    def run(self, jaxpr: core.Jaxpr, skipped: frozenset[int] = frozenset()) -> core.Jaxpr:
        """Marks all but the equations of the given numbers; the same object if there are none."""
        # A function called twice is lowered once as long as its jaxpr is one object.
        if id(jaxpr) not in self.done:
            self.done[id(jaxpr)] = self._marked(jaxpr, skipped)
            self.alive.append(jaxpr)
        return self.done[id(jaxpr)]

    def _marked(self, jaxpr: core.Jaxpr, skipped: frozenset[int]) -> core.Jaxpr:
        known, eqns = found(jaxpr), list[core.JaxprEqn]()
        marked: dict[Any, core.Var] = {}
        for number, eqn in enumerate(jaxpr.eqns):
            if number in skipped:
                eqns.append(eqn)
            elif _is_markable(eqn):
                operand: Any = eqn.invars[0]
                if operand not in marked:
                    mark = known.get(operand)
                    new = core.Var(operand.aval)
                    eqns.append(_equation(eqn, new, mark.key if mark else None))
                    marked[operand] = new
                eqns.append(eqn.replace(invars=[marked[operand], *eqn.invars[1:]]))
            else:
                eqns.append(self._descend(eqn))
        if len(eqns) == len(jaxpr.eqns) and all(map(_is, eqns, jaxpr.eqns)):
            return jaxpr
        return jaxpr.replace(eqns=eqns)

    def _descend(self, eqn: core.JaxprEqn) -> core.JaxprEqn:
        if eqn.primitive.name in OPAQUE or eqn.primitive.name == REGION or read(eqn) is not None:
            return eqn
        params = {k: self._parameter(k, v) for k, v in eqn.params.items()}
        if all(params[k] is v for k, v in eqn.params.items()):
            return eqn
        return eqn.replace(params=params)

    def _parameter(self, name: str, value: Any) -> Any:
        if isinstance(value, core.Jaxpr):
            return self.run(value)
        if name == "fwd_jaxpr_thunk":
            return _compat.edit_made_jaxpr(value, lambda jaxpr, zeros: insert(jaxpr))
        if name == "jvp_jaxpr_fun":
            return _compat.edit_made_jaxpr(value, _insert_in_jvp)
        if not isinstance(value, tuple | list):
            return value
        items = [self._parameter("", item) for item in value]
        if all(map(_is, items, value)):
            return value
        kind = type(value)
        return kind(*items) if hasattr(kind, "_fields") else kind(items)


def found(jaxpr: core.Jaxpr) -> dict[core.Var, Mark]:
    """Returns the marked variables of a body.

    A collective is one that the program itself has if its first operand is among them; else
    differentiation made it. Steps that transformations put behind a mark are looked through.

    Args:
      jaxpr: a body of a program, after all transformations. Bodies inside are not looked at.
    """
    marks: dict[Any, Mark] = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive is mark_p:
            operand, *key = eqn.invars
            marks[eqn.outvars[0]] = Mark(key[0]) if key else _look_up(operand, marks) or Mark()
        elif eqn.primitive.name in _PASSED and (mark := _look_up(eqn.invars[0], marks)):
            marks[eqn.outvars[0]] = mark
    return marks


def _look_up(value: Any, marks: dict[Any, Mark]) -> Mark | None:
    return marks.get(value) if isinstance(value, core.Var) else None


def _is(new: Any, old: Any) -> bool:
    return new is old


def _is_markable(eqn: core.JaxprEqn) -> bool:
    spec = read(eqn)
    if spec is None or not eqn.invars or eqn.primitive is barrier_p:
        return False
    return spec.op != "prod" and isinstance(eqn.invars[0], core.Var)


def _equation(eqn: core.JaxprEqn, out: core.Var, key: Any) -> core.JaxprEqn:
    """Returns the mark before a collective, with the same source."""
    operands = [eqn.invars[0]] if key is None else [eqn.invars[0], key]
    return core.new_jaxpr_eqn(operands, [out], mark_p, {}, set(), eqn.source_info, eqn.ctx)


def _insert_in_jvp(jaxpr: core.Jaxpr, zeros: tuple[bool, ...]) -> core.Jaxpr:
    """Marks a custom derivative's equations that depend on no tangent: the function itself."""
    num_tangents = len(zeros) - sum(zeros)
    tangents = set(jaxpr.invars[len(jaxpr.invars) - num_tangents :])
    derived = set[int]()
    for number, eqn in enumerate(jaxpr.eqns):
        if any(isinstance(v, core.Var) and v in tangents for v in eqn.invars):
            derived.add(number)
            tangents.update(eqn.outvars)
    return _Inserter().run(jaxpr, frozenset(derived))


@mark_p.def_impl
def _eager(x: Any, *key: Any) -> Any:
    return x


@mark_p.def_abstract_eval
def _type(x: Any, *key: Any) -> Any:
    return x


def _jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    return mark_p.bind(*primals), tangents[0]


def _transpose(ct: Any, x: Any, *key: Any) -> list[Any]:
    return [ct, *(None for _ in key)]


def _batch(args: Any, dims: Any) -> tuple[Any, Any]:
    if any(dim is not None for dim in dims[1:]):
        raise ValueError(
            "a collective with key= inside jax.vmap: the key differs from element to element, but"
            " the elements are carried and rounded together; pass the same key to all of them"
            " (in_axes=None for the key)"
        )
    return mark_p.bind(*args), dims[0]


def _remat(saveable: Any, unknown: Any, known_later: Any, eqn: core.JaxprEqn) -> Any:
    """Keeps a mark next to its collective: it is computed again, never saved in its place."""
    pairs = zip(eqn.invars, known_later, strict=True)
    residuals = [v for v, is_known in pairs if isinstance(v, core.Var) and not is_known]
    is_unknown = any(unknown)
    return (None if is_unknown else eqn), eqn, [is_unknown], [True], residuals


def _lower(ctx: Any, x: Any, *key: Any) -> list[Any]:
    return [x]


ad.primitive_jvps[mark_p] = _jvp
ad.primitive_transposes[mark_p] = _transpose
batching.primitive_batchers[mark_p] = _batch
pe.partial_eval_jaxpr_custom_rules[mark_p] = _remat
mlir.register_lowering(mark_p, _lower)
