"""The program on a host for `shardwright doctor`: it reads the host's facts, then tests connections to other hosts.

It needs the standard library and the room `hosts` alone, so that it can be sent to a host that has neither torch nor
this package. `look` reads everything once; `main` is the program that ssh starts, which goes on to answer orders:

    {"order": "clock"}                          {"time_s": 1700000000.1}
    {"order": "look"}                           what `look` gives, with the port on which this host listens
    {"order": "reach", "peers": [...], ...}     who of them can be reached: by TCP, by name and by ssh; from now on
                                                this host says its word to whoever connects
"""

from __future__ import annotations

import contextlib
import getpass
import glob
import hashlib
import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from shardwright.cluster.doctor import sources
from shardwright.cluster.programs.on_host import answer_orders, login_try
from shardwright.launch.hosts import interfaces
from shardwright.launch.hosts.hosts import resolve
from shardwright.launch.supervisor.preflight import version

COMMAND_S = 4.0
_TORCH_S = 10.0  # importing it takes seconds
REACH_S = 3.0
BULK_BYTES = 1 << 18
"""So much comes after the word of a host that is reached: packets of full size, which a small MTU on the way loses."""
_MOST_BYTES = 1 << 16
_LIMITS = {"open files": resource.RLIMIT_NOFILE, "processes": resource.RLIMIT_NPROC, "locked": resource.RLIMIT_MEMLOCK}
_NCCL = """
import ctypes, sys
version = ctypes.c_int()
ctypes.CDLL(sys.argv[1]).ncclGetVersion(ctypes.byref(version))
print(version.value)
"""
_ARCHITECTURES = """
import torch
print(*torch.cuda.get_arch_list())
"""


def look() -> dict[str, Any]:
    """Return everything that checks read of this host, as JSON can hold it."""
    with ThreadPoolExecutor(16) as pool:
        commands = {" ".join(words): pool.submit(_run, words) for words in sources.COMMANDS}
        nccl, named = pool.submit(_nccl), pool.submit(resolve, socket.gethostname(), REACH_S)
        architectures = pool.submit(_architectures)
        files, unreadable = _files()
        facts = {**_interpreter(), **_machine(), "nccl": nccl.result(), "own_name": named.result() or None}
        facts["torch_architectures"] = architectures.result()
        ran = {name: answer for name, future in commands.items() if (answer := future.result()) is not None}
    return {"files": files, "unreadable": unreadable, "commands": ran, "facts": facts}


def _files() -> tuple[dict[str, str], dict[str, str]]:
    files: dict[str, str] = {}
    unreadable: dict[str, str] = {}
    for path in (path for pattern in sources.FILES for path in sorted(glob.glob(pattern))):
        try:
            with open(path, "rb") as file:
                files[path] = file.read(_MOST_BYTES).decode(errors="replace")
        except OSError as error:
            unreadable[path] = error.strerror or str(error)
    return files, unreadable


def _run(words: Sequence[str], timeout_s: float = COMMAND_S) -> dict[str, Any] | None:
    """Return what a program says, or None where there is none of that name beside this interpreter or on the PATH.

    `shardwright launch` looks for mpirun in the same places. The code is None where the program did not end in time.
    """
    beside, path = str(Path(sys.executable).parent), os.environ.get("PATH")
    program = shutil.which(words[0], path=beside) or shutil.which(words[0], path=path)
    if program is None:
        return None
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(
            [program, *words[1:]], stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, start_new_session=True
        )
    except OSError as error:
        return {"code": None, "out": "", "err": error.strerror or str(error)}
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _give_up(process)
        return {"code": None, "out": "", "err": f"it did not end within {timeout_s:g} s"}
    texts = [text[:_MOST_BYTES].decode(errors="replace") for text in (out, err)]
    return {"code": process.returncode, "out": texts[0], "err": texts[1]}


def _give_up(process: subprocess.Popen[bytes]) -> None:
    """Kill a process, without waiting for long: one that hangs in a driver cannot be killed."""
    process.kill()
    for pipe in (process.stdout, process.stderr):
        assert pipe is not None
        pipe.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(0.5)


def _interpreter() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "packages": {name: found for name in sources.PACKAGES if (found := version(name, sys.path))},
        "torch_cuda": _torch_cuda(),
        "code": _code(),
    }


def _torch_cuda() -> str | None:
    """Return the CUDA that torch was built for, by its version file: importing torch would take seconds."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError, OSError):
        path = Path(str(importlib.metadata.distribution("torch").locate_file("torch/version.py")))
        for line in path.read_text().splitlines():
            name, equals, value = line.partition("=")
            if equals and name.split(":")[0].strip() == "cuda":
                return value.strip().strip("'\"").replace("None", "") or None
    return None


def _code() -> str | None:
    """Return a digest of the sources of shardwright that this interpreter would import."""
    for folder in sys.path:
        root = Path(folder) / "shardwright"
        if (root / "__init__.py").is_file():
            digest = hashlib.sha256()
            for path in sorted(root.rglob("*.py")):
                digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
            return digest.hexdigest()[:12]
    return None


def _machine() -> dict[str, Any]:
    return {
        "name": socket.gethostname(),
        "user": getpass.getuser(),
        "root": os.geteuid() == 0,
        "cpus": len(os.sched_getaffinity(0)),
        "all_cpus": os.cpu_count(),
        "limits": {name: list(resource.getrlimit(kind)) for name, kind in _LIMITS.items()},
        "disks": _disks(),
        "addresses": [[a.interface, a.address, a.mbits_per_s] for a in interfaces.own_addresses()],
        "environment": _environment(os.environ),
        "library_folders": [_library_folder(path) for path in os.environ.get("LD_LIBRARY_PATH", "").split(":") if path],
        "davinci": len(glob.glob("/dev/davinci[0-9]*")),
        "programs": [
            name for name in sources.PROGRAMS if shutil.which(name, path=f"{os.environ.get('PATH')}:/usr/sbin")
        ],
    }


def _disks() -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for path in ("/dev/shm", os.environ.get("TMPDIR", "/tmp"), os.path.expanduser("~"), os.getcwd()):
        with contextlib.suppress(OSError):
            usage = os.statvfs(path)
            found[path] = [usage.f_bavail * usage.f_frsize, usage.f_blocks * usage.f_frsize]
    return found


def _environment(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name in sources.VARIABLES or name.startswith(sources.PREFIXES)
    }


def _library_folder(path: str) -> dict[str, Any]:
    try:
        names = os.listdir(path)
    except OSError as error:
        return {"path": path, "error": error.strerror or str(error), "libraries": []}
    return {"path": path, "error": None, "libraries": sorted(n for n in names if n.startswith(sources.LIBRARIES))}


def _nccl() -> dict[str, Any] | None:
    """Return the NCCL that torch would load, tried in a process of its own; None where there is no library.

    Of several packages it is that of the CUDA that torch was built for.
    """
    fitting = sources.nccl_package((_torch_cuda() or "").partition(".")[0])
    for name in sorted(sources.NCCL_PACKAGES, key=lambda name: name != fitting):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found = importlib.metadata.distribution(name)
            path = str(found.locate_file("nvidia/nccl/lib/libnccl.so.2"))
            answer = _run((sys.executable, "-c", _NCCL, path)) or {"code": None, "out": "", "err": ""}
            return {"package": name, "version": found.version, "loads": answer["code"] == 0, "said": answer["err"]}
    return None


def _architectures() -> list[str] | None:
    """Return the GPUs for which torch has kernels, as ``sm_90``; None without GPUs, or where it says none in time."""
    if _torch_cuda() is None or shutil.which("nvidia-smi") is None:
        return None
    answer = _run((sys.executable, "-c", _ARCHITECTURES), _TORCH_S)
    return answer["out"].split() if answer is not None and answer["code"] == 0 else None


# --- what the program on a host does after it has looked


def main(_packed: int) -> None:
    """Answer orders until there are no more."""
    listening = interfaces.listen()
    listening.setblocking(True)

    def reach(order: dict[str, Any]) -> dict[str, Any]:
        threading.Thread(target=_serve, args=(listening, order["word"].encode()), daemon=True).start()
        return _reach(order["peers"])

    answer_orders({
        "clock": lambda _: {"time_s": time.time()},
        "look": lambda _: {**look(), "port": listening.getsockname()[1]},
        "reach": reach,
    })  # fmt: skip


def _serve(listening: socket.socket, word: bytes) -> None:
    while True:
        connected, _ = listening.accept()
        threading.Thread(target=_send, args=(connected, word), daemon=True).start()


def _send(connected: socket.socket, word: bytes) -> None:
    with contextlib.suppress(OSError), connected:
        connected.settimeout(REACH_S)
        connected.sendall(word + bytes(BULK_BYTES))


def _reach(peers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    no_ssh = {"code": None, "out": "", "err": "there is no ssh program"}
    with ThreadPoolExecutor(max(1, 3 * len(peers))) as pool:
        tcp = {p["name"]: pool.submit(_connect_all, p["addresses"], p["port"], p["word"].encode()) for p in peers}
        names = {p["name"]: pool.submit(resolve, p["resolve"], REACH_S) for p in peers}
        ssh = {p["name"]: pool.submit(_run, login_try(p["target"], int(COMMAND_S)), 2 * COMMAND_S) for p in peers}
        return {
            name: {"tcp": tcp[name].result(), "addresses": names[name].result(), "ssh": ssh[name].result() or no_ssh}
            for name in tcp
        }


def _connect_all(addresses: Sequence[str], port: int, word: bytes) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(max(1, len(addresses))) as pool:
        return list(pool.map(lambda address: _connect(address, port, word), addresses))


def _connect(address: str, port: int, word: bytes) -> dict[str, Any]:
    """Try an address: ``how`` is refused, silent, another, stalls or all, ``mine`` the address of this end."""
    answer: dict[str, Any] = {"address": address, "how": "silent", "mine": None, "said": ""}
    heard = 0
    begin = b""
    try:
        with socket.create_connection((address, port), timeout=REACH_S) as connected:
            answer |= {"mine": str(connected.getsockname()[0]), "how": "stalls"}
            until_s = time.monotonic() + REACH_S
            while heard < len(word) + BULK_BYTES and time.monotonic() < until_s:
                data = connected.recv(1 << 16)
                if not data:
                    break
                begin, heard = (begin + data)[: len(word)], heard + len(data)
    except ConnectionRefusedError as error:
        return answer | {"how": "refused", "said": str(error)}
    except OSError as error:
        answer["said"] = str(error)
    if len(begin) == len(word) and begin != word:
        return answer | {"how": "another"}
    return answer | ({"how": "all"} if heard >= len(word) + BULK_BYTES else {})
