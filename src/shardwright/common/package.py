"""The folder of this package, and its wings: files are looked for by this alone, so that none is lost by a move."""

from __future__ import annotations

import time
from pathlib import Path

FOLDER = Path(__file__).parents[1]
"""The folder of the package."""
SEARCHED = FOLDER.parent
"""The folder that a new interpreter adds to `sys.path` to import the package."""
IMPORTED_AT = time.time()
"""The seconds since the epoch when this process, or the one it was forked from, began to import the package."""

# In the order in which data passes them: a wing imports itself and those before it (`importlinter` in pyproject.toml).
WINGS = (
    "errors",
    "common",
    "launch",
    "distributed",
    "compiler",
    "checkpoint",
    "data",
    "runtime",
    "training",
    "cluster",
    "ocr",
    "cli",
)
# What needs the standard library alone, so that it can be sent to a host without packages.
STANDARD_LIBRARY_ONLY = (
    "errors",
    *(f"common/{name}" for name in (
        "__init__", "whole_file", "schema", "package", "private_folder", "words", "system_errors", "step_lines",
        "pulse",
    )),
    "launch",
)  # fmt: skip


def sources(*places: str) -> dict[str, bytes]:
    """Return the Python files of wings, folders or modules (``common/words``), by their path below the package, sorted.

    Raises:
        FileNotFoundError: where a place has no files, so that a name that no longer fits is not passed over.
    """
    found: dict[str, bytes] = {}
    for place in places:
        file = FOLDER / f"{place}.py"
        paths = [file] if file.is_file() else sorted((FOLDER / place).rglob("*.py"))
        if not paths:
            raise FileNotFoundError(f"there is no {place!r} in {FOLDER}; the wings are {', '.join(WINGS)}")
        found |= {path.relative_to(FOLDER).as_posix(): path.read_bytes() for path in paths}
    return found


def changed_since_import() -> bool:
    """Return whether a Python file of the package changed since the import, so that running code may differ from it.

    It goes by the times that files were last changed by, which, unlike those of their content, no copying sets back.
    """
    return max((path.stat().st_ctime for path in FOLDER.rglob("*.py")), default=0.0) >= IMPORTED_AT
