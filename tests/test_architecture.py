"""Folders import only what stands above them, and private torch APIs live in one file."""

import ast
from pathlib import Path

import pytest

import shardwright

ROOT = Path(shardwright.__file__).parent
# The order in which data passes the rooms of the house: each may import itself and those before it.
ORDER = [
    "errors",
    "whole_file",
    "launch",
    "torch_private",
    "mesh",
    "rules",
    "graph",
    "plan",
    "lower",
    "checkpoint",
    "report",
    "data",
    "run",
    "cluster",
    "zoo",
    "cli",
]
STANDARD_LIBRARY_ONLY = {"errors", "whole_file", "launch"}


def imports(path: Path) -> list[tuple[str, int]]:
    """Every module that a file imports, absolute, with its line; imports under TYPE_CHECKING count too."""
    package = ["shardwright", *path.relative_to(ROOT).with_suffix("").parts[:-1]]
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) + "." if node.level else ""
            module = f"{base}{node.module or ''}".rstrip(".")
            found += [
                (f"{module}.{alias.name}", node.lineno) if module == "shardwright" else (module, node.lineno)
                for alias in node.names
            ]
    return found


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").parts[0]


FILES = [p for p in sorted(ROOT.rglob("*.py")) if room_of(p) not in {"__init__", "__main__"}]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_upwards(path):
    room = room_of(path)
    assert room in ORDER, f"{room} has no place in the order of rooms: {ORDER}"
    allowed = set(ORDER[: ORDER.index(room) + 1])
    for module, line in imports(path):
        if module.split(".")[0] != "shardwright":
            continue
        target = module.split(".")[1] if "." in module else ""
        assert target in allowed or target == "__version__", (
            f"{path}:{line} imports {module}, which stands below {room}"
        )


@pytest.mark.parametrize(
    "path", [p for p in FILES if room_of(p) in STANDARD_LIBRARY_ONLY], ids=lambda p: str(p.relative_to(ROOT))
)
def test_starting_needs_the_standard_library_alone(path):
    import sys

    for module, line in imports(path):
        root = module.split(".")[0]
        if root == "shardwright" or root in sys.stdlib_module_names:
            continue
        assert (path.name, root) == ("zygote.py", "torch"), f"{path}:{line} imports {module}"


def test_public_names_exist_and_are_sorted():
    for name in shardwright._PUBLIC:
        assert getattr(shardwright, name) is not None
    assert list(shardwright.__all__) == ["__version__", *sorted(shardwright._PUBLIC)]


@pytest.mark.parametrize(
    "path", [p for p in FILES if room_of(p) != "torch_private"], ids=lambda p: str(p.relative_to(ROOT))
)
def test_private_torch_names_live_in_one_file(path):
    for module, line in imports(path):
        parts = module.split(".")
        assert parts[0] != "torch" or not any(p.startswith("_") and not p.startswith("__") for p in parts), (
            f"{path}:{line} imports the private {module}; move that use to torch_private.py"
        )
