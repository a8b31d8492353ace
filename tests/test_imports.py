"""Who may enter whom: the contracts in pyproject.toml, and what each library is kept to."""

import ast
import subprocess
import sys

import pytest
import tiny

SOURCES = {path.stem: path.read_text() for path in (tiny.ROOT / "normstudy").glob("*.py")}
TREES = {name: ast.parse(text) for name, text in SOURCES.items()}


def importers(package: str) -> set[str]:
    """Modules of normstudy that import the package, anywhere in the file."""
    found = set()
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            if any(module.split(".")[0] == package for module in modules):
                found.add(name)
    return found


def calls(attribute: str) -> list[str]:
    """Places where .attribute is called."""
    return [
        f"{name}.py:{node.lineno}"
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == attribute
    ]


def test_import_contracts_are_kept():
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()",
         "--no-cache"],
        cwd=tiny.ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def test_flax_is_imported_by_the_model_rooms_alone():
    assert importers("flax") == {"norms", "sublayers", "model"}


@pytest.mark.parametrize(
    "package, rooms",
    [
        ("orbax", {"checkpoint"}),
        ("grain", {"data"}),
        ("tensorboardX", {"tensorboard"}),
        ("matplotlib", {"figures", "paper_figures", "phase_figure", "probe_figure", "ramp_figure"}),
        ("tyro", {"cli"}),
        ("rich", {"progress"}),
    ],
)
def test_library_is_imported_by_its_own_room_alone(package, rooms):
    assert importers(package) == rooms


def test_mesh_axes_are_named_in_the_mesh_room_alone():
    """As strings. The fields of the config have the same names, but are no strings."""
    axes = {"data", "fsdp", "tensor"}
    found = {
        (name, node.value)
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value in axes
    }
    others = {("figures", "data"), ("cli", "data")}  # matplotlib's coordinates, a folder
    assert found - others == {("mesh", axis) for axis in axes}


def test_nothing_is_sown():
    """Under a scan, sow and perturb silently return nothing."""
    assert calls("sow") == [] and calls("perturb") == []


def test_nothing_is_left_uninitialised():
    found = [
        f"{name}.py:{node.lineno}"
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in ("empty", "empty_like")
        and isinstance(node.value, ast.Name)
        and node.value.id == "jnp"
    ]
    assert found == []


def test_transforms_and_optimizer_are_not_flax_s():
    forbidden = {"jit", "grad", "value_and_grad", "vmap", "scan", "remat", "Optimizer"}
    found = [
        f"{name}.py:{node.lineno}"
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "nnx"
        and node.attr in forbidden
    ]
    assert found == []


def test_no_room_asks_for_a_placement_by_name():
    """Only the table knows the names; everything else asks the row."""
    from normstudy.placements import PLACEMENTS

    compared = [
        f"{name}.py:{node.lineno}"
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
        for part in (node.left, *node.comparators)
        if isinstance(part, ast.Constant) and part.value in PLACEMENTS
    ]
    assert compared == []


def test_no_room_is_called_utils():
    assert not {"utils", "util", "helpers", "misc", "common"} & set(SOURCES)


def test_every_room_says_what_it_is():
    for name, tree in TREES.items():
        assert ast.get_docstring(tree), f"{name}.py has no docstring"
