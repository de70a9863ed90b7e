"""Data behind a URL, copied once per host into a cache.

Anything that fsspec reaches: ``s3://``, ``gs://``, ``file://`` and more. The ranks of a host meet at a lock of the
operating system, which a killed process gives back; the first copies, the others find the copy. A copy becomes visible
when it is complete, under a name made of the URL and of what the remote side says about its files (size and etag, or
time of change), so that changed data are copied anew. Old copies stay until somebody deletes them.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardwright.checkpoint.storage.folders import file_system
from shardwright.errors import DataError
from shardwright.launch.progress_notes import waiting_for

_STAMPS = ("etag", "ETag", "md5Hash", "checksum", "mtime", "LastModified", "last_modified", "updated", "created")

Listing = dict[str, tuple[int, str]]  # path below the URL ("" for a file) -> size and stamp


def cache_folder() -> Path:
    """Return the folder of copies: ``shardwright/data`` in the user's cache (``XDG_CACHE_HOME`` or ``~/.cache``)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardwright" / "data"


def local_copy(url: str | os.PathLike[str], cache: Path | None = None) -> Path:
    """The local path of a file or folder: ``url`` itself if it is a path, else its copy in the cache.

    Raises:
        UsageError: for a protocol that is unknown or whose package is not installed.
        DataError: where the URL cannot be read, or the copy is not what was listed.
    """
    if "://" not in os.fspath(url):
        return Path(url)
    url = os.fspath(url)
    files, source = file_system(url)
    try:
        listing = _listing(files, source)
    except Exception as error:  # each protocol has exceptions of its own
        raise DataError(f"{url}: cannot be read: {type(error).__name__}: {error}") from error
    if not listing:
        raise DataError(f"{url}: there is no such file, and no folder with files in it")
    key = hashlib.sha256(json.dumps([url, sorted(listing.items())]).encode()).hexdigest()[:32]
    home = (cache or cache_folder()) / key
    copy = home / source.rstrip("/").rsplit("/")[-1]
    if not home.exists():
        with waiting_for(f"copying {url}"), _locked(home.with_suffix(".lock")):
            if not home.exists():
                _copy(files, source, url, listing, copy)
    return copy


def _listing(files: Any, source: str) -> Listing:
    listed = files.find(source, detail=True)
    return {
        path.removeprefix(source).lstrip("/"): (int(facts["size"]), _stamp(facts)) for path, facts in listed.items()
    }


def _stamp(facts: dict[str, Any]) -> str:
    return next((str(facts[name]) for name in _STAMPS if facts.get(name) is not None), "")


def _copy(files: Any, source: str, url: str, listing: Listing, copy: Path) -> None:
    """Fetch every file into a temporary folder, check it, and give the folder its name."""
    temporary = copy.parent.with_suffix(".part")
    shutil.rmtree(temporary, ignore_errors=True)  # what a killed process left; the lock is ours
    try:
        for name, (size, _) in listing.items():
            target = temporary / copy.name / name
            target.parent.mkdir(parents=True, exist_ok=True)
            _fetch(files, f"{source.rstrip('/')}/{name}" if name else source, target)
            if target.stat().st_size != size:
                raise DataError(
                    f"{url}: {name or copy.name} changed while it was copied: expected {size} bytes, "
                    f"got {target.stat().st_size}; start again"
                )
        temporary.rename(copy.parent)
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{url}: cannot be copied to {copy}: {type(error).__name__}: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _fetch(files: Any, source: str, target: Path) -> None:
    files.get_file(source, str(target))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
