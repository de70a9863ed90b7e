"""Where this package lies, and its rooms: files are looked for by this alone, so that none is lost by a move."""

from __future__ import annotations

import time
from pathlib import Path

FOLDER = Path(__file__).parent
"""The folder of the package."""
SEARCHED = FOLDER.parent
"""What a new interpreter adds to `sys.path` to import the package."""
IMPORTED_AT = time.time()
"""When this process, or the one that it was forked from, began to import the package, in seconds since the epoch."""

# In the order in which data passes them: a room imports itself and those before it (tests/test_architecture.py).
ROOMS = (
    "errors",
    "whole_file",
    "schema",
    "package",
    "private_folder",
    "native_code",
    "words",
    "system_errors",
    "steps",
    "pulse",
    "hosts",
    "waiting",
    "launch",
    "torch_private",
    "backends",
    "world",
    "mesh",
    "rules",
    "graph",
    "plan",
    "lower",
    "report",
    "checkpoint",
    "data",
    "run",
    "training",
    "verification",
    "cluster",
    "zoo",
    "ocr",
    "integrations",
    "notebook",
    "cli",
)


def sources(*rooms: str) -> dict[str, bytes]:
    """The Python files of rooms, at any depth, by their path below the folder of the package, sorted.

    Raises:
        FileNotFoundError: where a room has no files, so that a name that no longer fits is not passed over.
    """
    found: dict[str, bytes] = {}
    for room in rooms:
        file = FOLDER / f"{room}.py"
        paths = [file] if file.is_file() else sorted((FOLDER / room).rglob("*.py"))
        if not paths:
            raise FileNotFoundError(f"there is no room {room!r} in {FOLDER}; the rooms are {', '.join(ROOMS)}")
        found |= {path.relative_to(FOLDER).as_posix(): path.read_bytes() for path in paths}
    return found


def changed_since_import() -> bool:
    """Return whether some Python file was written since the import, so that what runs may not be what stands there.

    It goes by the times that files were last changed by, which, unlike those of their content, no copying sets back.
    """
    return max((path.stat().st_ctime for path in FOLDER.rglob("*.py")), default=0.0) >= IMPORTED_AT
