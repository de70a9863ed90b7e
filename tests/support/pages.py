"""Pages of the documentation whose blocks a reader runs one after the other, in one folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
_LIMIT_S = 250


def run_blocks(page: Path, folder: Path) -> list[str]:
    """Run a page's blocks in order, in ``folder``; the languages of the blocks, so that a test can say what it ran.

    A block in python is the file that its first line names; one in bash must succeed; one in text is what the block in
    bash before it prints, to the letter.
    """
    # A table of ranks that a test before has set is none of the page's.
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("RANK", "DEVICE"))}
    variables |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    printed = None
    for language, text in blocks:
        if language == "python":
            name = re.match(r"# (\w+\.py)\n", text)
            assert name, f"{page.name}: a block in python must begin with the name of its file, not {text[:40]!r}"
            (folder / name[1]).write_text(text)
        elif language == "bash":
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", text],
                cwd=folder, env=variables, capture_output=True, text=True, timeout=_LIMIT_S,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            printed = done.stdout, done.stderr
        else:
            assert language == "text", f"{page.name}: nobody checks a block in {language!r}"
            assert printed is not None, f"{page.name}: no block in bash prints {text!r}"
            assert printed[0] == text, f"{printed[0]}\n{printed[1]}"
            printed = None
    return [language for language, _ in blocks]
