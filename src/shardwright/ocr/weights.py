"""The weights that a network begins with: those of a file or of an address, which `torch.hub` keeps on this host."""

from __future__ import annotations

import fcntl
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch
from torch import Tensor

from shardwright.checkpoint.api import load
from shardwright.errors import CheckpointError
from shardwright.launch.progress_notes import waiting_for
from shardwright.ocr.networks.published import Published
from shardwright.ocr.options.parts import BACKBONES
from shardwright.ocr.options.sections import Model

_SILENCE_S = 30.0  # a network that answers nothing for so long is none


def backbone_problems(model: Model) -> list[str]:
    """Return what is wrong with the weights that the backbone begins with, a line each; they are fetched for that."""
    given, key = model.backbone.pretrained, "model.backbone.pretrained"
    if given is not True:
        return _file_problems(given, key) if given else []
    published = BACKBONES.row(model.backbone).published
    if published is None:
        known = ", ".join(name for name, row in BACKBONES.rows.items() if row.published)
        return [
            f"{key}: there are no published weights of {model.backbone.name}, but of {known}; type -o {key}=False, or "
            "name a file"
        ]
    return published.problems(model.backbone) or _fetch_problems(published.url, key)


def network_problems(model: Model) -> list[str]:
    """Return what is wrong with the weights that the whole network begins with; they are fetched for that."""
    return _file_problems(model.pretrained, "model.pretrained") if model.pretrained else []


def begin(model: Model, network: Any) -> None:
    """Load the weights that a configuration begins with into ``network``, those of its backbone first.

    Raises:
        UsageError, CheckpointError: where they cannot be had, or do not fit.
    """
    row = BACKBONES.row(model.backbone)
    if model.backbone.pretrained is True:
        published = row.published
        assert published is not None
        published.into(network.backbone, _state(published))
    elif model.backbone.pretrained:
        load(_path_of(model.backbone.pretrained), network.backbone)
    if model.pretrained:
        load(_path_of(model.pretrained), network)


def _file_problems(given: str, key: str) -> list[str]:
    off = "False" if key.endswith("backbone.pretrained") else "null"
    without = f"name a file of torch's, or type -o {key}={off} to begin with random numbers"
    if given.endswith(".ckpt"):
        return [f"{key}: {given} holds weights of MindSpore, which cannot be read here; {without}"]
    if _is_address(given):
        return _fetch_problems(given, key)
    return [] if Path(given).exists() else [f"{key}: there are no weights {given}; {without}"]


def _is_address(given: str) -> bool:
    return urlparse(given).scheme in ("http", "https")


def _path_of(given: str) -> str:
    return str(cached(given)) if _is_address(given) else given


def cached(url: str) -> Path:
    """Return the path at which the file of an address is cached."""
    return Path(torch.hub.get_dir()) / "checkpoints" / Path(urlparse(url).path).name


def _fetch_problems(url: str, key: str) -> list[str]:
    try:
        fetch(url)
    except OSError as error:
        return [
            f"{key}: there is no {cached(url)}, and {url} cannot be fetched ({error}); fetch it where there is a "
            f"network, and copy it to {cached(url)}"
        ]
    except RuntimeError as error:  # the file is not the one that its name says
        return [f"{key}: {url}: {error}"]
    return []


def fetch(url: str) -> Path:
    """Return the path of the file of an address, which is fetched where `torch.hub` has it not yet, by one process.

    Raises:
        OSError: where it cannot be fetched.
    """
    path = cached(url)
    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with _alone(path), _impatient(), waiting_for(f"fetching {url}"):
        if not path.is_file():
            torch.hub.download_url_to_file(url, str(path), _hash_in(path.name), progress=False)
    return path


def _hash_in(name: str) -> str | None:
    """The beginning of the SHA-256 of a file, which torch's have in their names."""
    found = Path(name).stem.rpartition("-")[2]
    return found if len(found) == 8 and all(character in "0123456789abcdef" for character in found) else None


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    lock = path.with_name(f"{path.name}.lock")
    with lock.open("w") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


@contextmanager
def _impatient() -> Iterator[None]:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_SILENCE_S)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def _state(published: Published) -> Mapping[str, Tensor]:
    path = fetch(published.url)
    try:
        state: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of zip, pickle or torch, as the file may be anything
        raise CheckpointError(f"{path} cannot be read ({error}); delete it to have it fetched anew") from error
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{path} holds {type(state).__name__}, expected the state of {published.network}")
    return state
