"""The import graph: downwards only, no cycles, private jax in one file, `__init__` re-exports."""

import ast
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "xcoll"

LAYERS = (
    ("errors", "files", "streams", "units", "printing", "_compat"),
    (
        "names",
        "dtypes",
        "memory",
        "records",
        "codecs",
        "permits",
        "policy",
        "topology",
        "hardware",
        "hosts",
    ),
    ("schedule", "proof", "choosing", "plan", "ranks"),
    (
        "algorithms",
        "libtpu",
        "loads",
        "local_work",
        "natives",
        "runs",
        "costmodel",
        "emitted",
        "pieces",
        "accounting",
        "regrouping",
        "routes",
        "simulate",
    ),
    (
        "roundoff",
        "precision",
        "candidates",
        "compress",
        "forced",
        "sharing",
        "options",
        "direct_sums",
        "planner",
    ),
    (
        "indexing",
        "wire",
        "encoded",
        "execute",
        "lower",
        "payload",
        "nesting",
        "recording",
        "stages",
        "meshes",
        "layouts",
        "axis_shapes",
        "systems",
        "device_order",
        "targets",
        "aot",
        "mesh_report",
        "mesh_analysis",
        "waits",
        "agreement",
    ),
    ("composite_types", "composite_native", "composite_rules", "composites", "barriers"),
    (
        "traffic",
        "lockstep",
        "sites",
        "marks",
        "cut_rules",
        "cuts",
        "hints",
        "kept",
        "permissions",
        "grouping",
        "rewrite",
        "primitives",
        "report",
    ),
    ("calls", "collectives", "rooted", "sharding"),
    ("graphs", "transform", "deviation", "measure", "gradients", "hlo", "calibration"),
    ("typed", "commands", "cli", "__main__", "__init__"),
)
"""From the bottom: a module imports its own layer or lower ones, and never in a circle."""

LAYER = {name: number for number, names in enumerate(LAYERS) for name in names}


@functools.cache
def modules() -> dict[str, Path]:
    """Dotted names below xcoll ("algorithms.rings", "algorithms.__init__") and their files."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for path in sorted(ROOT.rglob("*.py"))
    }


@functools.cache
def imports(path: Path) -> set[str]:
    """Every module that a file imports, at its top or inside a function, by dotted name."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: a relative import"
            # `from xcoll import planner` imports xcoll.planner; a name of a module does too.
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def internal(path: Path) -> set[str]:
    """The project's modules among them, as `modules` names them."""
    found = set()
    for name in imports(path):
        if name == "xcoll" or name.startswith("xcoll."):
            parts = name.split(".")[1:]
            while (module := known(parts)) is None:
                parts.pop()  # the last part is a name inside a module
            found.add(module)
    return found


def known(parts: list[str]) -> str | None:
    """The module of that dotted name: a file, or the `__init__` of a package."""
    candidates = (".".join(parts), ".".join([*parts, "__init__"]))
    return next((name for name in candidates if name in modules()), None)


def top(module: str) -> str:
    return module.split(".")[0]


@pytest.mark.parametrize("module", modules())
def test_every_module_has_a_layer(module):
    assert top(module) in LAYER, "add it to LAYERS"


@pytest.mark.parametrize("module", modules())
def test_imports_go_downwards(module):
    for other in internal(modules()[module]):
        assert other != "__init__", "nothing inside imports the package itself"
        if top(other) != top(module):
            assert LAYER[top(other)] <= LAYER[top(module)], f"xcoll.{module} imports xcoll.{other}"


def test_no_cycles():
    graph = {name: internal(path) - {name} for name, path in modules().items()}
    while graph:
        leaves = {name for name, needs in graph.items() if not needs & graph.keys()}
        assert leaves, f"these import each other in a circle: {sorted(graph)}"
        graph = {name: needs for name, needs in graph.items() if name not in leaves}


@pytest.mark.parametrize("module", sorted(set(modules()) - {"_compat"}))
def test_only_compat_imports_private_jax(module):
    private = {name for name in imports(modules()[module]) if "jax._src" in name}
    assert not private and "jax._src" not in modules()[module].read_text()


def exported(package: str) -> set[str]:
    """Names that a package's `__init__` re-exports, modules that it exports as such apart."""
    return {
        alias.asname or alias.name
        for node in ast.walk(ast.parse((ROOT / package / "__init__.py").read_text()))
        if isinstance(node, ast.ImportFrom) and node.module != "xcoll"
        for alias in node.names
    }


def test_no_module_has_the_name_of_a_public_function():
    every_part = {part for name in modules() for part in name.split(".")}
    assert not every_part & exported("")
    for package in (
        "algorithms",
        "calibration",
        "codecs",
        "gradients",
        "hardware",
        "hlo",
        "sharding",
    ):
        files = {path.stem for path in (ROOT / package).glob("*.py")}
        assert not files & exported(package), package


def test_init_only_re_exports():
    body = ast.parse((ROOT / "__init__.py").read_text()).body
    assert ast.get_docstring(ast.Module(body, []))
    for node in body[1:]:
        if isinstance(node, ast.ImportFrom):
            assert all(alias.asname == alias.name for alias in node.names), ast.unparse(node)
        else:
            # The version is the one value beside the names.
            assert isinstance(node, ast.Assign), ast.unparse(node)
            assert ast.unparse(node.targets[0]) in ("__all__", "__version__")


def test_schedules_and_planning_need_no_jax():
    for name in ("schedule", "proof", "plan", "policy", "costmodel", "simulate", "planner"):
        if (path := modules().get(name)) is not None:
            assert not {i for i in imports(path) if top(i) in ("jax", "jaxlib")}, name
    for name, path in modules().items():
        if top(name) == "algorithms":
            assert not {i for i in imports(path) if top(i) in ("jax", "jaxlib")}, name
