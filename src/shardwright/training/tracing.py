"""The callback that traces chosen steps of a run by torch's profiler, on all ranks, into one file."""

from __future__ import annotations

import json
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from shardwright.common.pulse import own_pulse
from shardwright.common.whole_file import write_whole
from shardwright.compiler.report.traces import merged
from shardwright.distributed.agreement import attempt, from_all_ranks
from shardwright.errors import UsageError
from shardwright.training.hooks import Callback, RunView


class Tracer(Callback):
    """Traces the optimizer steps of these numbers on all ranks, with their operators, and writes them into one file.

    ``<folder>/trace.json`` is for ui.perfetto.dev or chrome://tracing: each rank is a process there, and a collective
    has the name of the module or parameter for which it is. Of steps that follow each other one trace is made, which is
    named by the first of them where there are several: ``trace.20.json``. A traced step takes longer than others.

    Args:
        folder: where the files are; rank 0 writes them.
        steps: numbers of optimizer steps, counted from 1.

    Raises:
        UsageError: where a number is no step's.
    """

    on_every_rank = True

    def __init__(self, folder: str | Path, steps: Sequence[int]) -> None:
        if not steps or any(not isinstance(step, int) or step < 1 for step in steps):
            raise UsageError(f"expected Tracer(steps=...) to be numbers of steps from 1 on, got {list(steps)}")
        self.folder, self.steps = Path(folder), frozenset(steps)
        self._profile: profile | None = None
        self._first = 0
        self._warned = False  # whether a person knows why there are none

    def alike(self) -> dict[str, Any]:
        return {"folder": str(self.folder), "steps": sorted(self.steps)}

    def on_fit_begin(self, run: RunView) -> None:
        self._begin_if_due(run)

    def on_step_end(self, run: RunView) -> None:
        if self._profile is not None and run.steps + 1 not in self.steps:
            self._write(run)
        self._begin_if_due(run)

    def on_fit_end(self, run: RunView) -> None:
        self._write(run)

    def close(self, run: RunView) -> None:
        self._end()

    def _begin_if_due(self, run: RunView) -> None:
        if self._profile is not None or run.steps + 1 not in self.steps:
            return
        for execution in run.parallel.executions():
            execution.tell_sites()
        own_pulse().around = record_function
        on_gpu = [ProfilerActivity.CUDA] if run.world.device.type == "cuda" else []
        self._first, self._profile = run.steps + 1, profile(activities=[ProfilerActivity.CPU, *on_gpu])
        self._profile.start()

    def _end(self) -> profile | None:
        ended, self._profile = self._profile, None
        if ended is not None:
            own_pulse().around = None
            ended.stop()
        return ended

    def _write(self, run: RunView) -> None:
        """All ranks come by together. Where one of them cannot, or the file cannot be written, the training goes on."""
        if self._profile is None:
            return
        everyone = from_all_ranks(attempt(self._exported))
        if run.world.rank != 0:
            return
        problem = next((f"rank {rank}: {why}" for rank, (why, _) in enumerate(everyone) if why), None)
        problem = problem or attempt(lambda: self._save([data for _, data in everyone]))[0]
        if problem and not self._warned:
            self._warned = True
            print(f"no trace in {self.folder}: {problem}; the training goes on", flush=True)

    def _exported(self) -> bytes:
        ended = self._end()
        assert ended is not None
        with tempfile.TemporaryDirectory(prefix="shardwright-trace-") as folder:
            path = Path(folder, "trace.json")
            ended.export_chrome_trace(str(path))
            return zlib.compress(path.read_bytes())

    def _save(self, everyone: Sequence[bytes]) -> None:
        text = json.dumps(merged([json.loads(zlib.decompress(data)) for data in everyone]))
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / self._name()
        write_whole(path, lambda draft: draft.write_text(text))
        print(f"trace: {path} (for ui.perfetto.dev)", flush=True)

    def _name(self) -> str:
        several = sum(step - 1 not in self.steps for step in self.steps) > 1
        return f"trace.{self._first}.json" if several else "trace.json"
