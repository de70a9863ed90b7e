"""The program on a host for `shardwright hosts trust`: it reads ~/.ssh, applies requested changes, and undoes them.

It needs the standard library alone, so that it can be sent to a bare host. Its orders:

    {"order": "look"}                               the public keys, the lines that are there, what could be undone
    {"order": "key"}                                makes a key where there is none, and answers its public part
    {"order": "add", "authorized": [...], "known": [...]}     adds the lines that are missing
    {"order": "undo"}                               puts everything back as it was before the first change
    {"order": "login", "targets": [...]}            tries ssh to each

Before the first change of a file, what it was is written to ~/.ssh/shardwright-trust.json, beside the lines that were
added since. Where nobody else has changed the file it is put back byte for byte; otherwise our lines are taken out.
"""

from __future__ import annotations

import base64
import contextlib
import getpass
import hashlib
import json
import os
import socket
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from shardwright.cluster.programs.on_host import answer_orders, login_try
from shardwright.common.whole_file import write_whole

_RECORD = "shardwright-trust.json"
_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa")
_CONNECT_S = 5
_LOGIN_S = 15.0
_LOGINS_AT_ONCE = 16


class Folder:
    """The folder ~/.ssh of a home."""

    def __init__(self, home: Path) -> None:
        self.path = home / ".ssh"
        self.record = self.path / _RECORD

    # --- looking

    def look(self) -> dict[str, Any]:
        return {
            "name": socket.gethostname(),
            "user": getpass.getuser(),
            "key": self.public_key(),
            "authorized": self._lines("authorized_keys"),
            "known": self._lines("known_hosts"),
            "undo": sorted(self._kept()["files"]) if self.record.exists() else [],
        }

    def public_key(self) -> str | None:
        """Return the public key that ssh would offer first, of those of which both parts are there."""
        for name in _KEYS:
            public = self.path / f"{name}.pub"
            if (self.path / name).exists() and public.exists():
                return public.read_text().strip()
        return None

    def _lines(self, name: str) -> list[str]:
        try:
            return (self.path / name).read_text(errors="surrogateescape").splitlines()
        except FileNotFoundError:
            return []

    # --- changing

    def make_key(self) -> dict[str, Any]:
        """Make a key where there is none; one that is there stays as it is."""
        if (known := self.public_key()) is not None:
            return {"key": known, "made": False}
        path = self.path / _KEYS[0]
        if path.exists():
            raise OSError(f"{path} has no {path.name}.pub beside it; type `ssh-keygen -y -f {path} > {path}.pub`")
        self._begin()
        self._keep(path.name)
        self._keep(f"{path.name}.pub")
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", f"{getpass.getuser()}@{socket.gethostname()}"]
        done = subprocess.run([*words, "-f", str(path)], capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.returncode != 0:
            raise OSError(f"ssh-keygen: {(done.stderr or done.stdout).strip()}")
        for name in (path.name, f"{path.name}.pub"):
            self._note(name, [])
        return {"key": self.public_key(), "made": True}

    def add(self, authorized: Sequence[str], known: Sequence[str]) -> dict[str, Any]:
        """Add the lines that are missing. A file in which nothing is missing is not touched."""
        added = {}
        for name, lines, mode in (("authorized_keys", authorized, 0o600), ("known_hosts", known, 0o644)):
            there = set(self._lines(name))
            missing = [line for line in dict.fromkeys(lines) if line not in there]
            if missing:
                self._begin()
                self._keep(name)
                self._append(name, missing, mode)
                self._note(name, missing)
            added[name] = len(missing)
        return added

    def _begin(self) -> None:
        """Make the folder and the record; whether the folder was there is the first thing in it."""
        if self.record.exists():
            return
        there = self.path.exists()
        self.path.mkdir(mode=0o700, exist_ok=True)
        self._write_record({"folder": there, "files": {}})

    def _kept(self) -> dict[str, Any]:
        kept: dict[str, Any] = json.loads(self.record.read_text())
        return kept

    def _write_record(self, kept: dict[str, Any]) -> None:
        _replace(self.record, json.dumps(kept).encode(), 0o600)

    def _keep(self, name: str) -> None:
        """Write down the content of a file before its first change."""
        kept = self._kept()
        if name in kept["files"]:
            return
        path = self.path / name
        before = mode = None
        with contextlib.suppress(FileNotFoundError):
            before, mode = base64.b64encode(path.read_bytes()).decode(), path.stat().st_mode & 0o7777
        kept["files"][name] = {"before": before, "mode": mode, "after": None, "lines": []}
        self._write_record(kept)

    def _append(self, name: str, lines: Sequence[str], mode: int) -> None:
        path = self.path / name
        data = path.read_bytes() if path.exists() else b""
        if data and not data.endswith(b"\n"):
            data += b"\n"
        data += "".join(f"{line}\n" for line in lines).encode(errors="surrogateescape")
        _replace(path, data, path.stat().st_mode & 0o7777 if path.exists() else mode)

    def _note(self, name: str, lines: Sequence[str]) -> None:
        """Write down the digest of a file after a change of ours, and the lines that came with it."""
        kept = self._kept()
        kept["files"][name]["after"] = _digest(self.path / name)
        kept["files"][name]["lines"] += lines
        self._write_record(kept)

    # --- undoing

    def undo(self) -> dict[str, Any]:
        """Put back what was there; ``cleaned`` are files that others have changed since: only our lines went out."""
        if not self.record.exists():
            return {"restored": [], "cleaned": [], "left": []}
        kept = self._kept()
        told: dict[str, Any] = {"restored": [], "cleaned": [], "left": []}
        for name, one in kept["files"].items():
            told[self._undo_file(name, one)].append(name)
        self.record.unlink()
        if not kept["folder"]:
            with contextlib.suppress(OSError):  # others have put something into it
                self.path.rmdir()
        return told

    def _undo_file(self, name: str, one: dict[str, Any]) -> str:
        path = self.path / name
        now = _digest(path)
        if now is not None and now != one["after"]:
            if not one["lines"]:
                return "left"
            lines = path.read_bytes().splitlines(keepends=True)
            ours = {line.encode(errors="surrogateescape") for line in one["lines"]}
            kept = b"".join(line for line in lines if line.rstrip(b"\r\n") not in ours)
            _replace(path, kept, path.stat().st_mode & 0o7777)
            return "cleaned"
        if one["before"] is None:
            path.unlink(missing_ok=True)
        else:
            _replace(path, base64.b64decode(one["before"]), one["mode"])
        return "restored"


def _digest(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except FileNotFoundError:
        return None


def _replace(path: Path, data: bytes, mode: int) -> None:
    """Write a file at once or not at all; a link is followed, so that it stays one."""

    def write(draft: Path) -> None:
        draft.touch(0o600)
        draft.write_bytes(data)
        draft.chmod(mode)

    write_whole(Path(os.path.realpath(path)), write)


def login(targets: Sequence[str]) -> dict[str, str | None]:
    """Return, for each target, None where ssh needs nothing from a person, or why it does."""
    with ThreadPoolExecutor(_LOGINS_AT_ONCE) as pool:
        return dict(zip(targets, pool.map(_login, targets), strict=True))


def _login(target: str) -> str | None:
    try:
        done = subprocess.run(
            login_try(target, _CONNECT_S), stdin=subprocess.DEVNULL, capture_output=True, timeout=_LOGIN_S
        )
    except subprocess.TimeoutExpired:
        return f"it did not end within {_LOGIN_S:g} s"
    except OSError as error:
        return f"ssh cannot be started: {error.strerror}"
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return None if done.returncode == 0 else (lines[-1] if lines else f"exit code {done.returncode}")


def main(_packed: int) -> None:
    """Answer orders until there are no more."""
    folder = Folder(Path.home())
    answers: dict[str, Callable[[dict[str, Any]], Any]] = {
        "look": lambda _: folder.look(),
        "key": lambda _: folder.make_key(),
        "add": lambda order: folder.add(order["authorized"], order["known"]),
        "undo": lambda _: folder.undo(),
        "login": lambda order: {"logins": login(order["targets"])},
    }
    answer_orders(answers)
