"""The command ``shardwright verify`` starts the ranks that verify a file, and turns their verdict into an exit code.

Imports no torch: the ranks do.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from shardwright.errors import ShardwrightError, UsageError
from shardwright.launch.options.launch_options import read_options
from shardwright.launch.options.request import LaunchRequest
from shardwright.launch.start import launch
from shardwright.runtime.verification.build import BuildFunction


def verify_file(target: str, ranks: str | None, options: dict[str, Any]) -> int:
    """Verify ``FILE.py:build`` on new processes of this host; ``options`` are those of `verify`, and the seed.

    Returns 0 where every deviation is within tolerance and 1 where one is not. Where a rank crashed, it returns 2, or
    the rank's own code if that is larger, after the launcher has said which one and why; the logs are then kept.

    Raises:
        UsageError: where the file or an argument does not fit, or with what the ranks have to say about the model.
    """
    BuildFunction.parse(target)
    folder = Path(tempfile.mkdtemp(prefix="shardwright-verify-"))
    try:
        verdict = _verdict_of_ranks(target, ranks, options, folder)
    except ShardwrightError:
        shutil.rmtree(folder)
        raise
    if isinstance(verdict, int):
        return max(verdict, 2)
    shutil.rmtree(folder)
    if "error" in verdict:
        raise UsageError(verdict["error"])
    return 0 if verdict["ok"] else 1


def _verdict_of_ranks(target: str, ranks: str | None, options: dict[str, Any], folder: Path) -> dict[str, Any] | int:
    """The verdict that rank 0 wrote down, or the exit code of ranks that came to none."""
    verdict = folder / "verdict.json"
    module = ["shardwright.runtime.verification.main", target, str(verdict), json.dumps(options)]
    request = LaunchRequest(kind="module", arguments=module, ranks=ranks, tee="0", log_dir=str(folder / "logs"))
    code = launch(read_options(request))
    return code if code or not verdict.exists() else dict(json.loads(verdict.read_text()))
