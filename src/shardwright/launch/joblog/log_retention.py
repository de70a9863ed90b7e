"""Logs that stay on the host of their ranks: written by its agent, to the paths that they would have here.

Where the hosts share a file system they are where they always are. The launcher hears only what it shows on the
console, the end of what a rank wrote, from which the verdict is made, and what the disk did not take.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from shardwright.launch.host.protocol import STREAMS, KeptAt, LogLost
from shardwright.launch.joblog.logs import TAIL_BYTES, LogFile


class KeptLogs:
    """The files of the ``ranks`` of this host. Raises `OSError` where they cannot be made."""

    def __init__(self, kept: KeptAt, ranks: Iterable[int]) -> None:
        self.shown = frozenset(kept.shown)
        folder, begin = Path(kept.folder), kept.begin.encode()
        self._tails: dict[int, dict[str, bytearray]] = {}
        self._files: dict[tuple[int, str], LogFile] = {}
        for rank in ranks:
            if rank not in self.shown:
                self._tails[rank] = {stream: bytearray() for stream in STREAMS}
            (folder / f"rank.{rank}").mkdir(parents=True, exist_ok=True)
            for stream in STREAMS:
                self._files[rank, stream] = LogFile(str(folder / f"rank.{rank}" / stream), begin)

    def write(self, rank: int, stream: str, data: bytes) -> bool:
        """Write what a rank has written. Returns whether the launcher is to see it, too."""
        self._files[rank, stream].write(data)
        if (tails := self._tails.get(rank)) is not None:
            tails[stream] += data
            del tails[stream][:-TAIL_BYTES]
        return rank in self.shown

    def take_tails(self, rank: int) -> dict[str, bytes]:
        """What the launcher has not seen of the end of a rank's output."""
        return {stream: bytes(tail) for stream, tail in self._tails.pop(rank, {}).items() if tail}

    def close(self) -> list[LogLost]:
        """Close the files. Returns what was lost, for the launcher."""
        losses = []
        for (rank, stream), file in self._files.items():
            reason = file.close()
            if file.lost_bytes or reason:
                losses.append(LogLost(rank, stream, file.lost_bytes, reason))
        self._files.clear()
        return losses
