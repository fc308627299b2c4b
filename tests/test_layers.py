"""The architecture as a table, held against the imports that the code really has."""

import ast
from pathlib import Path

import pytest

import grove_adapters

ROOT = Path(grove_adapters.__file__).parent
FOUNDATION = {"errors", "seeding", "config", "registry", "_checks", "_io"}

LAYERS: dict[str, set[str]] = {
    # room: the other rooms of the package it may import; every room may import the foundation
    "errors": set(),
    "seeding": set(),
    "config": set(),
    "registry": set(),
    "_checks": set(),
    "_io": set(),
    "embeddings": set(),
    "spherical": set(),
    "posterior": {"embeddings", "spherical"},
    "extract": {"embeddings"},
    "store": {"embeddings", "extract"},
    "datasets": {"embeddings", "extract"},
    "similarity": {"embeddings", "posterior"},
    "heads": set(),
    "objectives": set(),
    "adapters": {"embeddings", "posterior", "similarity", "heads", "objectives"},
    "tasks": {"embeddings", "posterior", "similarity"},
    "calibration": {"tasks"},
    "plots": {"calibration", "tasks", "posterior"},
    "html": {"calibration", "tasks", "plots"},
    "testing": {"adapters", "datasets", "embeddings", "posterior"},
    "pipeline": {
        "embeddings", "posterior", "extract", "store", "datasets", "similarity", "adapters", "tasks", "calibration",
        "plots", "html",
    },
    "cli": {
        "pipeline", "extract", "store", "datasets", "adapters", "tasks", "calibration", "similarity", "html",
        "embeddings", "posterior",
    },
}  # fmt: skip

FOUNDATION_LAYERS: dict[str, set[str]] = {
    "errors": set(),
    "seeding": set(),
    "config": {"errors"},
    "registry": {"config", "errors"},
    "_checks": {"config", "errors"},
    "_io": {"errors"},
}


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
            if node.module == "grove_adapters":
                names = [f"grove_adapters.{alias.name}" for alias in node.names]
        else:
            assert not isinstance(node, ast.ImportFrom), f"{path}: relative imports hide the layers"
        found |= {name.split(".")[1] for name in names if name.startswith("grove_adapters.")}
    return found - {room(path)}


FILES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_follow_the_table(path):
    allowed = FOUNDATION_LAYERS.get(room(path), FOUNDATION | LAYERS[room(path)])
    assert imported_rooms(path) <= allowed


def test_the_table_has_no_empty_rooms_and_no_cycles():
    assert {room(path) for path in FILES} == set(LAYERS)
    order: list[str] = []
    while len(order) < len(LAYERS):
        ready = [name for name, needs in LAYERS.items() if name not in order and needs <= set(order)]
        assert ready, f"a cycle among {sorted(set(LAYERS) - set(order))}"
        order += ready


def test_one_adapter_never_imports_another():
    shared = {"base", "checkpoint", "loop", "variance_heads", "wrapping"}
    for path in (ROOT / "adapters").rglob("*.py"):
        home = path.relative_to(ROOT / "adapters").parts[0].removesuffix(".py")
        if home == "__init__":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("grove_adapters.adapters."):
                assert node.module.split(".")[2] in shared | {home}, f"{path}: imports {node.module}"
