"""Removing what a job leaves on a host. The supervisor needs this alone of what `stage` and its modules do."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def remove_folder(path: Path) -> None:
    """Remove a folder, also where somebody has taken away the right to write to what is in it. Never raises."""
    for folder, names, _ in os.walk(path):
        for name in names:
            below = os.path.join(folder, name)
            if not os.path.islink(below) and not os.access(below, os.W_OK | os.X_OK):
                os.chmod(below, 0o700)
    shutil.rmtree(path, ignore_errors=True)
