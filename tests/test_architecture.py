"""Wings import only those before them, no imports go in circles, and private torch APIs live in one file."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest
from importlinter.cli import lint_imports

import shardwright
from shardwright.common import package

ROOT = package.FOLDER
REPOSITORY = Path(__file__).parents[1]
MOST_FILES = 15


def test_imports_keep_the_contracts(monkeypatch, capsys):
    """Those in pyproject.toml: the order of wings, no circles, no packages where jobs are started."""
    monkeypatch.chdir(REPOSITORY)
    assert lint_imports(no_cache=True) == 0, capsys.readouterr().out


def test_every_wing_is_there():
    found = {path.stem for path in ROOT.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert found - {"__init__", "__main__"} == set(package.WINGS)


def test_names_of_test_files_are_unique():
    """Without packages pytest imports each by its name alone."""
    files = [path.name for path in (REPOSITORY / "tests").rglob("*.py")]
    assert [name for name, count in Counter(files).items() if count > 1] in ([], ["conftest.py"])


def crowded(root: Path, pattern: str) -> dict[str, int]:
    folders = [root, *(path for path in root.rglob("*") if path.is_dir() and path.name != "__pycache__")]
    counts = {str(path.relative_to(REPOSITORY)): len(list(path.glob(pattern))) for path in folders}
    return {folder: count for folder, count in counts.items() if count > MOST_FILES}


def test_no_folder_is_crowded():
    assert not crowded(ROOT, "*.py") | crowded(REPOSITORY / "tests", "*.py") | crowded(REPOSITORY / "docs", "*")


def test_a_folder_without_sources_is_an_error():
    with pytest.raises(FileNotFoundError, match=r"there is no 'compiler/nowhere' in .*; the wings are errors, "):
        package.sources("compiler/mesh", "compiler/nowhere")
    assert "launch/hangs/stacks.py" in package.sources("launch")


def test_public_names_exist_and_are_sorted():
    for name in shardwright._PUBLIC:
        assert getattr(shardwright, name) is not None
    assert list(shardwright.__all__) == ["__version__", *sorted(shardwright._PUBLIC)]


def private_of_torch(path: Path) -> list[str]:
    """The imports of private modules and names of torch in a file, each with its line."""
    found, text = [], path.read_text()
    if not re.search(r"\bfrom\s+torch\b|\bimport\b.*\btorch\.", text):
        return []  # parsing takes long
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            root, *parts = name.split(".")
            if root == "torch" and any(part.startswith("_") and not part.startswith("__") for part in parts):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno} imports the private {name}")
    return found


def test_private_torch_names_live_in_one_file():
    others = [path for path in ROOT.rglob("*.py") if path != ROOT / "common" / "torch_private.py"]
    assert [line for path in others for line in private_of_torch(path)] == []
    assert private_of_torch(ROOT / "common" / "torch_private.py")
