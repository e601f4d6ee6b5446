"""`gradients.value_and_grad` compiled for two TPU slices: what crosses, what is not gathered."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

from xcoll import Policy, aot, codecs, hlo
from xcoll.gradients import value_and_grad

pytest.importorskip("libtpu", reason="needs libtpu, of the aot extra")

P = jax.P
TARGET = "2*v5e:2x2"
WIDTH = 256
TENSOR = {"up": P(None, "model"), "down": P("model"), "bias": P()}
SHARDED = {"up": P("data", "model"), "down": P("model", "data"), "bias": P()}

ELEMENTS = 2 * WIDTH * 2 * WIDTH
"""Of the two matrices. The model axis halves what a device has of them, and the data axis that."""
EXACT_BYTES = ELEMENTS // 4 * 4
"""What a device sends to the other slice of the sums of both."""
CODED_BYTES = ELEMENTS // 4 + 4096
"""The same as codes of a byte, and a byte for each block of 256, of which there are 256 and which
the encoding rounds up to 4096."""
TILE_BYTES = 8 * 128 * 4
"""The bias is under the limit of 64 KiB and stays exact: at most a tile of float32."""


@functools.cache
def mesh_of(kind="Auto"):
    mesh = aot.mesh(TARGET, (2, 2, 2), ("dcn", "data", "model"))
    return jax.sharding.Mesh(
        mesh.devices, mesh.axis_names, axis_types=(getattr(AxisType, kind),) * 3
    )


def loss(params, x, y):
    hidden = jax.nn.relu(x @ params["up"])
    # Explicit axes want to know the result of a product over a dimension that is divided.
    is_typed = jax.typeof(params["down"]).sharding.spec == P("model", None)
    options = {"out_sharding": P()} if is_typed else {}
    out = jnp.dot(hidden, params["down"], **options)
    return jnp.mean((out + params["bias"] - y) ** 2)


@functools.cache
def compiled(name, kind="Auto"):
    """The program of a step that takes and gives parameters as they lie, and its report."""
    mesh, specs = mesh_of(kind), SHARDED if name.endswith("FSDP") else TENSOR
    shapes = {"up": (WIDTH, 2 * WIDTH), "down": (2 * WIDTH, WIDTH), "bias": (WIDTH,)}
    shardings = {k: jax.NamedSharding(mesh, spec) for k, spec in specs.items()}
    params = {
        k: jax.ShapeDtypeStruct(shapes[k], jnp.float32, sharding=shardings[k]) for k in shapes
    }
    rows = jax.NamedSharding(mesh, P(("dcn", "data")))
    x = jax.ShapeDtypeStruct((256, WIDTH), jnp.float32, sharding=rows)
    if name.startswith("plain"):
        step = jax.value_and_grad(loss)
    else:
        int8 = Policy(codec={"dcn": codecs.int8()})
        step = value_and_grad(
            loss,
            mesh=mesh,
            axis_name="dcn" if name.endswith("FSDP") else ("dcn", "data"),
            policy=int8 if name.startswith("int8") else None,
            param_specs=specs if kind == "Auto" else None,
            topology=TARGET,
        )
    where = (jax.NamedSharding(mesh, P()), shardings)
    program = jax.jit(step, out_shardings=where).lower(params, x, x).compile()
    return program, step.reports[-1] if hasattr(step, "reports") else None


def rows_over(axis, program):
    mesh = mesh_of()
    return [row for row in hlo.collectives(program) if axis in hlo.axes_of(row, mesh)]


def over_model(program):
    return [row.kind for row in rows_over("model", program)]


def check_crossing(sent, exact):
    assert 0 < sent["dcn"] - CODED_BYTES <= TILE_BYTES
    assert 0 < exact["dcn"] - EXACT_BYTES <= TILE_BYTES


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_int8_crosses_slices_beside_tensor_parallelism(kind):
    program, report = compiled("int8", kind)
    sends = [row for row in rows_over("dcn", program) if row.kind == "send"]
    assert sorted(row.dtypes for row in sends) == [("f32",), ("s8",)]
    bias, up, down = sorted(report.sites, key=lambda site: site.num_bytes)
    assert up.plan.is_lossy and down.plan.is_lossy and not bias.plan.is_lossy
    assert up.plan.name == "hierarchical(native, direct(shots=1)/int8)"
    # The one all-reduce of activations that a product over a divided dimension needs.
    assert over_model(program) == over_model(compiled("plain")[0]) == ["all-reduce"]
    sent, exact = (hlo.wire_bytes(p, mesh_of()) for p in (program, compiled("plain")[0]))
    check_crossing(sent, exact)
    assert (sent["data"], sent["model"]) == (exact["data"], exact["model"])


def test_the_exact_plan_is_the_compilers_own_program():
    program, report = compiled("exact")
    assert all(site.kept_reason is not None for site in report.sites)
    programs = (program, compiled("plain")[0])
    rows = [sorted((row.kind, row.dtypes) for row in hlo.collectives(p)) for p in programs]
    assert rows[0] == rows[1]
    sent = [hlo.wire_bytes(p, mesh_of()) for p in programs]
    assert sent[0] == sent[1]


def test_int8_crosses_slices_beside_the_partitioners_fsdp():
    program, report = compiled("int8 FSDP")
    plain = compiled("plain FSDP")[0]
    assert [site.plan.is_lossy for site in sorted(report.sites, key=lambda s: s.num_bytes)] == [
        False, True, True,
    ]  # fmt: skip
    assert over_model(program) == over_model(plain) == ["all-reduce"]
    sends = {row.dtypes for row in rows_over("dcn", program) if row.kind == "send"}
    assert sends == {("f32",), ("s8",)}
    gathers = [sum(r.kind == "all-gather" for r in rows_over("data", p)) for p in (program, plain)]
    assert gathers[0] <= gathers[1]
    check_crossing(*(hlo.wire_bytes(p, mesh_of()) for p in (program, plain)))
