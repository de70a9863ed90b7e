"""Tracks the progress of the ranks of one host, and collects their stacks at the launcher's request.

A sign of life is a byte of output, or a pulse that has moved: a step, or a collective of shardwright's. The launcher,
which sees the ranks of all hosts, decides when they have been quiet for too long (`stall`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from shardwright.common.pulse import PulseFile
from shardwright.launch.hangs.stacks import Target, encode_observations, observe


class Progress:
    """The signs of life of ranks.

    ``stall_s`` is the silence after which the launcher will ask; ``wake`` ends the wait of the supervisor's loop.
    """

    def __init__(self, stall_s: float, pulses: Mapping[int, PulseFile], wake: Callable[[], object]) -> None:
        self.interval_s = min(1.0, stall_s / 8)
        self._pulses, self._wake = pulses, wake
        self._beats: dict[int, int] = {}
        self._moved_s = time.monotonic()
        self._looked_s = 0.0
        self._quiet_s = 0.0
        self._asked: threading.Thread | None = None
        self._answer: bytes | None = None

    def heard(self) -> None:
        """Note that a rank has written something."""
        self._moved_s = time.monotonic()

    def look(self) -> bool:
        """Read the pulses, if it is time to. Returns whether one has moved since the last look."""
        now_s = time.monotonic()
        if now_s < self._looked_s + self.interval_s:
            return False
        self._looked_s = now_s
        beats = {rank: pulse.read().beats for rank, pulse in self._pulses.items()}
        moved, self._beats = beats != self._beats, beats
        if moved:
            self._moved_s = now_s
        return moved

    def ask(self, targets: Mapping[int, Target]) -> None:
        """Begin to observe the ranks, which takes seconds in which the supervisor goes on."""
        if self._asked is None or not self._asked.is_alive():
            self._quiet_s = time.monotonic() - self._moved_s
            self._asked = threading.Thread(target=self._observe, args=(dict(targets),), daemon=True)
            self._asked.start()

    def _observe(self, targets: Mapping[int, Target]) -> None:
        self._answer = encode_observations(observe(targets))
        self._wake()

    def take_answer(self) -> tuple[float, bytes] | None:
        """Return once the seconds without progress at the time of the request, and the observations."""
        answer, self._answer = self._answer, None
        return None if answer is None else (self._quiet_s, answer)
