"""This package as bytes for a host that may not have it: what ssh sends before anything else.

The remote interpreter is started with `BOOT`, which reads from its standard input how long the first program is and
runs it. That program, which any Python understands, says that it is there (after whatever the host's shell printed),
tells of a Python that is too old, and otherwise keeps the zip file that follows in memory and starts a `main` from
it.
"""

from __future__ import annotations

import io
import secrets
import zipfile
from collections.abc import Mapping

from shardwright.common import package

LOWEST_PYTHON = (3, 11)
# Without line ends or exclamation marks, which some shells take apart even inside quotes. Reads no byte too many.
BOOT = "import io;f=io.BufferedReader(io.FileIO(0,closefd=False),1);exec(f.read(int(f.readline())))"

_FIRST = """
import os, sys
os.write(1, {mark!r})
if sys.version_info < {lowest!r}:
    os.write(1, ('{{"message": "TooOld", "python": "%s"}}\\n' % sys.version.split()[0]).encode())
    sys.exit(0)
packed = os.memfd_create("shardwright", 0)
with open(packed, "wb", closefd=False) as file:
    file.write(f.read({size}))
if not sys.flags.safe_path: del sys.path[0]
sys.path.insert(0, "/proc/self/fd/%d" % packed)
from {module} import main
del sys.path[0]
main(packed)
"""
# Of the supervisor, which the agent starts; as that of `local`, but what was sent goes before what is installed.
SUPERVISOR_BOOT = """
import sys
if not sys.flags.safe_path: del sys.path[0]
sys.path.insert(0, "/proc/self/fd/{packed}")
from shardwright.launch.supervisor.main import main
del sys.path[0]
main()
"""
# Where a host has the package too, torch finds its entry point (pyproject.toml), and calls what has that name here. The
# groups that it then makes are of the package of the host, which ranks import.
_PACKAGE = b"""
def _register_backends():
    import torch.distributed as dist

    if dist.is_available() and "shm" not in dist.Backend.backend_list:
        dist.Backend.register_backend("shm", _create, extended_api=True, devices=["cpu"])


def _create(options, _):
    from shardwright.distributed.backends.shm_meeting import create

    return create(options)
"""


def sources(*places: str) -> dict[str, bytes]:
    """Return what runs on other hosts, by its name in the zip file: what needs no packages, and these places."""
    files = {"__init__.py": _PACKAGE, **package.sources(*package.STANDARD_LIBRARY_ONLY, *places)}
    return {f"{package.FOLDER.name}/{name}": data for name, data in files.items()}


def pack(files: Mapping[str, bytes], module: str = "shardwright.launch.carriers.agent") -> tuple[bytes, bytes]:
    """Return the bytes for one interpreter, which run ``main`` of ``module``, and the line before its first answer."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, data in files.items():
            packed.writestr(name, data)
    zipped = buffer.getvalue()
    mark = f"\nshardwright-agent-{secrets.token_hex(8)}\n".encode()
    first = _FIRST.format(mark=mark, lowest=LOWEST_PYTHON, size=len(zipped), module=module).encode()
    return b"%d\n" % len(first) + first + zipped, mark
