"""Logs that stay on the host of their ranks: written by its agent, to the paths that they would have here.

Where the hosts share a file system they are where they always are. The launcher hears only what it shows on the
console, the end of what a rank wrote to stderr, from which the verdict is made, and what the disk did not take.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from shardwright.launch.host.protocol import STREAMS, Message
from shardwright.launch.kept.logs import TAIL_BYTES, LogFile


class KeptLogs:
    """``ranks`` are those of this host, ``shown`` those of the console; ``begin`` is the first line of a restart.

    Raises `OSError` where the files cannot be made.
    """

    def __init__(self, folder: Path, ranks: Collection[int], shown: Collection[int], begin: str) -> None:
        self.shown = frozenset(shown)
        self._tails = {rank: bytearray() for rank in ranks if rank not in self.shown}
        self._files: dict[tuple[int, str], LogFile] = {}
        for rank in ranks:
            (folder / f"rank.{rank}").mkdir(parents=True, exist_ok=True)
            for stream in STREAMS:
                self._files[rank, stream] = LogFile(str(folder / f"rank.{rank}" / stream), begin.encode())

    def write(self, rank: int, stream: str, data: bytes) -> bool:
        """Whether the launcher is to see it, too."""
        self._files[rank, stream].write(data)
        if stream == "stderr" and (tail := self._tails.get(rank)) is not None:
            tail += data
            del tail[:-TAIL_BYTES]
        return rank in self.shown

    def take_tail(self, rank: int) -> bytes:
        """What the launcher has not seen of the end of its stderr."""
        return bytes(self._tails.pop(rank, b""))

    def close(self) -> list[Message]:
        """What was lost, for the launcher."""
        told: list[Message] = []
        for (rank, stream), file in self._files.items():
            reason = file.close()
            if file.lost_bytes or reason:
                told.append({
                    "event": "log_lost", "rank": rank, "stream": stream, "bytes": file.lost_bytes, "reason": reason,
                })  # fmt: skip
        self._files.clear()
        return told
