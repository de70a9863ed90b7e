"""Rooms import only those above them, no imports go in circles, and private torch APIs live in one file."""

import ast
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import shardwright
from shardwright import package

ROOT = package.FOLDER
REPOSITORY = Path(__file__).parents[1]
# The order inside rooms that have rooms, with what each may import; a room's own files come after the rooms in it.
INSIDE = {
    "launch": ("host", "asked", "kept", "told", "hangs", "supervisor", "carriers", "printed"),
    "backends": ("segment", "between"),
    "checkpoint": ("format", "storage", "saving", "loading", "whole_run", "exchange", "inspection"),
    "graph": ("functional", "tracing"),
    "plan": ("pricing", "decided", "minima", "searching"),
    "report": ("pages", "plans", "runs"),
    "training": ("network", "records"),
    "run": ("graphs", "overlap", "compiled", "programs", "updates", "placing", "trying"),
    "cluster": ("programs", "bench", "doctor", "jobs", "watch", "trust"),
    "ocr": ("libraries", "networks", "samples", "asked", "scoring"),
}
STANDARD_LIBRARY_ONLY = {
    "errors", "whole_file", "schema", "package", "private_folder", "words", "system_errors", "steps", "pulse",
    "hosts", "waiting", "launch",
}  # fmt: skip
MOST_FILES = 15
FILES = [p for p in sorted(ROOT.rglob("*.py")) if p.name != "__main__.py" and p != ROOT / "__init__.py"]


def module_of(path: Path) -> str:
    """The dotted name of a file below the package, ``launch.hangs.stacks``."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in FILES}


@cache
def imports(path: Path) -> tuple[tuple[str, int], ...]:
    """Every module that a file imports, absolute, with its line; imports under TYPE_CHECKING count too."""
    package_parts = ["shardwright", *path.relative_to(ROOT).with_suffix("").parts[:-1]]
    found: list[tuple[str, int]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package_parts[: len(package_parts) - node.level + 1]) + "." if node.level else ""
            module = f"{base}{node.module or ''}".rstrip(".")
            named = [f"{module}.{alias.name}" for alias in node.names]
            ours = [name for name in named if name.removeprefix("shardwright.") in MODULES]
            found += [(name, node.lineno) for name in ours]
            if len(ours) < len(named):
                found.append((module, node.lineno))
    return tuple(found)


def our_imports(path: Path) -> Iterator[tuple[str, int]]:
    """Those of this package, without its name."""
    for module, line in imports(path):
        root, _, rest = module.partition(".")
        if root == "shardwright" and rest:
            yield rest, line


def place(module: str) -> tuple[int, int]:
    """Where a module stands in the order of rooms, and of the rooms inside its room."""
    room, *rest = module.split(".")
    assert room in package.ROOMS, f"{room} has no place in the order of rooms: {package.ROOMS}"
    inside = INSIDE.get(room, ())
    below = len(rest) > 1 or (rest and (ROOT / room / rest[0]).is_dir())
    return package.ROOMS.index(room), inside.index(rest[0]) if inside and below else len(inside)


def names(paths: Iterable[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


@pytest.mark.parametrize("path", FILES, ids=names(FILES))
def test_imports_point_upwards(path):
    here = place(module_of(path))
    for module, line in our_imports(path):
        assert place(module) <= here, f"{path}:{line} imports {module}, which stands below {module_of(path)}"


def test_every_room_is_there():
    rooms = {module.split(".")[0] for module in MODULES}
    assert rooms == set(package.ROOMS)
    for room, inside in INSIDE.items():
        assert {path.name for path in (ROOT / room).iterdir() if (path / "__init__.py").exists()} == set(inside)


def test_names_of_test_files_are_unique():
    """Without packages pytest imports each by its name alone."""
    files = [path.name for path in (REPOSITORY / "tests").rglob("*.py")]
    assert [name for name, count in Counter(files).items() if count > 1] in ([], ["conftest.py"])


def test_no_imports_go_in_circles():
    """Also not under TYPE_CHECKING or inside functions; a package's own imports are its contents, and do not count."""
    graph = {
        module: {name for name, _ in our_imports(path) if name in MODULES and name != module}
        for module, path in MODULES.items()
        if path.name != "__init__.py"
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' <- '.join(error.args[1])}")


def crowded(root: Path, pattern: str) -> dict[str, int]:
    folders = [root, *(path for path in root.rglob("*") if path.is_dir() and path.name != "__pycache__")]
    counts = {str(path.relative_to(REPOSITORY)): len(list(path.glob(pattern))) for path in folders}
    return {folder: count for folder, count in counts.items() if count > MOST_FILES}


def test_no_folder_is_crowded():
    assert not crowded(ROOT, "*.py") | crowded(REPOSITORY / "tests", "*.py") | crowded(REPOSITORY / "docs", "*")


STARTING = [p for p in FILES if module_of(p).split(".")[0] in STANDARD_LIBRARY_ONLY]


@pytest.mark.parametrize("path", STARTING, ids=names(STARTING))
def test_starting_needs_the_standard_library_alone(path):
    for module, line in imports(path):
        root = module.split(".")[0]
        if root == "shardwright" or root in sys.stdlib_module_names:
            continue
        assert (path.name, root) == ("zygote.py", "torch"), f"{path}:{line} imports {module}"


def test_a_folder_without_sources_is_an_error():
    with pytest.raises(FileNotFoundError, match=r"there is no room 'nowhere' in .*; the rooms are errors, "):
        package.sources("mesh", "nowhere")
    assert "launch/hangs/stacks.py" in package.sources("launch")


def test_public_names_exist_and_are_sorted():
    for name in shardwright._PUBLIC:
        assert getattr(shardwright, name) is not None
    assert list(shardwright.__all__) == ["__version__", *sorted(shardwright._PUBLIC)]


PUBLIC_ONLY = [p for p in FILES if p.name != "torch_private.py"]


@pytest.mark.parametrize("path", PUBLIC_ONLY, ids=names(PUBLIC_ONLY))
def test_private_torch_names_live_in_one_file(path):
    for module, line in imports(path):
        parts = module.split(".")
        assert parts[0] != "torch" or not any(p.startswith("_") and not p.startswith("__") for p in parts), (
            f"{path}:{line} imports the private {module}; move that use to torch_private.py"
        )
