"""The file of one rank in memory, in the layout that it will have on disk.

What is saved beside the training loop is copied once, straight to where it stands in the file, and summed while it is
in the cache; the file is then written from there in a few large calls, during which nothing holds the interpreter's
lock.
"""

from __future__ import annotations

import ctypes
import mmap
import warnings
from collections.abc import Collection, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwright.checkpoint.format.containers import ContainerFrame, frame_of
from shardwright.checkpoint.format.manifest import BLOCK_BYTES, Extent, checksum
from shardwright.checkpoint.saving.save import NO_BOX, Part, Prepared, Written, file_of
from shardwright.checkpoint.storage.files import written
from shardwright.checkpoint.storage.store import Store
from shardwright.common.pulse import own_pulse
from shardwright.common.torch_private import version
from shardwright.errors import CheckpointError

WRITE_BYTES = 64 << 20
ROOM_BYTES = 1 << 20
"""Beyond what is needed, since values (positions, lists of metrics) grow a little from save to save."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, eq=False)
class _Container:
    """A container that lies at ``start`` of the file; ``version`` is that of a tensor which is copied later."""

    part: Part
    source: Tensor | bytes
    start: int
    frame: ContainerFrame
    version: int | None = None


class Image:
    """Host memory for the file of one rank, reused from one save to the next."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def begin(self, prepared: Prepared, steady: Collection[str]) -> Copy:
        """Copy what is saved, but for the entries named in ``steady``, which `Copy.finish` copies."""
        found, size = [], 0
        for path, data in prepared.values.items():
            found.append(_Container((".".join(path), NO_BOX), data, size, ContainerFrame(b"", len(data), b"")))
            size += len(data)
        for part, tensor in prepared.parts.items():
            frame = frame_of(tensor.dtype, tensor.shape)
            later = part[0] in steady and not tensor.is_inference()  # inference tensors count no versions
            found.append(_Container(part, tensor, size, frame, version(tensor) if later else None))
            size += frame.length
        self._make_room(size, pinned=any(tensor.is_cuda for tensor in prepared.parts.values()))
        return Copy(self.memory, found)

    def _make_room(self, size: int, pinned: bool) -> None:
        if size > self.memory.numel():
            self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")  # give back the old before asking for the new
            self.memory = room_of(size + ROOM_BYTES, pinned)


class Copy:
    """A state on its way into an image. What may change at any time is in it when this is made."""

    def __init__(self, memory: Tensor, containers: Sequence[_Container]) -> None:
        self._memory = memory
        self._order = [container.part for container in containers]
        self._places: dict[Part, Extent] = {}
        self._later = [container for container in containers if container.version is not None]
        self._on_device = {c: c.source for c in containers if isinstance(c.source, Tensor) and c.source.is_cuda}
        for container in containers:
            if container.version is None:
                self._put(container)
        # What follows on the device is in the order of the training's own work; the rest goes beside it.
        self._beside = _streams_beside([tensor.device for tensor in self._on_device.values()])
        self._size_bytes = sum(container.frame.length for container in containers)

    def finish(self) -> None:
        """Copy the rest, in whatever thread; `CheckpointError` where a tensor was changed since the copy began."""
        on_device = self._on_device
        for container in self._later:
            tensor = on_device.get(container)
            with nullcontext() if tensor is None else torch.cuda.stream(self._beside[tensor.device]):
                self._put(container)
        for stream in self._beside.values():
            stream.synchronize()
        for container in self._later:
            assert isinstance(container.source, Tensor)
            if version(container.source) != container.version:
                raise CheckpointError(_changed(container.part[0]))
        self._later, self._on_device = [], {}  # what was copied may be given back by its owner
        for container in on_device:
            self._seal(container)

    def write(self, store: Store, directory: str, prepared: Prepared, rank: int) -> Written:
        """Write the file of this rank; what `save.write` takes."""
        name = file_of(rank)
        if not self._order:
            return Written(name, 0, {})
        whole: Bytes = self._memory.numpy()[: self._size_bytes]
        with written(store.files, f"{directory}/{name}", self._size_bytes) as file:
            for start in range(0, self._size_bytes, WRITE_BYTES):
                file.write(whole[start : start + WRITE_BYTES].data)
                own_pulse().beat()
        places = {}
        for part in self._order:
            at = self._places[part]
            places[part] = Extent(name, at.start, at.length, at.data, at.checksums)
        return Written(name, self._size_bytes, places)

    def _put(self, container: _Container) -> None:
        frame, source = container.frame, container.source
        target = self._memory[container.start : container.start + frame.length]
        if isinstance(source, Tensor):
            flat = source.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
            if flat.is_cuda:
                target[frame.data : frame.data + frame.size].copy_(flat, non_blocking=True)
                return
            data: Bytes = flat.cpu().numpy()
        else:
            data = np.frombuffer(source, dtype=np.uint8)
        self._seal(container, data)

    def _seal(self, container: _Container, data: Bytes | None = None) -> None:
        """Put around the elements what a container has around them, and sum it; ``data`` is copied block by block."""
        frame, start = container.frame, container.start
        target: Bytes = self._memory.numpy()[start : start + frame.length]
        target[: frame.data] = np.frombuffer(frame.head, dtype=np.uint8)
        target[frame.data + frame.size :] = np.frombuffer(frame.tail, dtype=np.uint8)
        sums = []
        for first in range(0, frame.length, BLOCK_BYTES):
            last = min(first + BLOCK_BYTES, frame.length)
            low, high = max(first, frame.data), min(last, frame.data + frame.size)
            if data is not None and low < high:
                target[low:high] = data[low - frame.data : high - frame.data]  # without the interpreter's lock
            sums.append(checksum(target[first:last]))
        self._places[container.part] = Extent("", start, frame.length, frame.data, tuple(sums))


def _streams_beside(devices: Collection[torch.device]) -> dict[torch.device, Any]:
    """Return a new stream for each of these GPUs, which waits for the work enqueued so far.

    It is of that GPU, whichever is the current one: a stream of another would neither order nor await its copies.
    """
    streams: dict[torch.device, Any] = {}
    for device in dict.fromkeys(devices):
        streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        streams[device].wait_stream(torch.cuda.current_stream(device))
    return streams


def _changed(name: str) -> str:
    return (
        f"nothing was saved: {name} was changed while it was being copied, by something else than the step of a torch "
        "optimizer (load_state_dict, an assignment, a forward that writes to its own parameters). Call "
        "sw.checkpoint.wait_copied() before it is changed; or save with asynchronous=False"
    )


# Memory of the host, to which GPUs copy while they work on. Torch's own is as large as the next power of two, up to
# twice what a state needs, on every rank of the host: so it is taken from the system, and the driver is told to pin it.


def room_of(size: int, pinned: bool) -> Tensor:
    """That many bytes, zero, beginning at a page; ``pinned`` for copies from GPUs that nobody waits for."""
    pages = _Pages(-1, size)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    memory.zero_()  # the system finds the pages now and not in the middle of the first copy
    if pinned:
        pages.pin(memory.data_ptr())
    return memory


class _Pages(mmap.mmap):
    """Memory that is registered with the CUDA driver (pinned), and unregistered before it is freed."""

    _pinned_at = 0

    def pin(self, address: int) -> None:
        """Pin all of it; where that fails, warn: copies are then still correct, but block."""
        error = int(_driver().cudaHostRegister(address, len(self), 0))
        if error:
            _forget_error()
            warnings.warn(
                f"{len(self) / 1e6:.0f} MB of memory for saves cannot be pinned (CUDA error {error}): each save "
                "holds the loop up until it is copied; more locked memory may help (ulimit -l)",
                stacklevel=2,
            )
        else:
            self._pinned_at = address

    def __del__(self) -> None:
        if self._pinned_at:
            with suppress(Exception):  # at the end of the process there may be no driver any more
                _driver().cudaHostUnregister(self._pinned_at)


def _forget_error() -> None:
    """Clear the last error of the driver, for which torch would blame the next kernel."""
    runtime = _runtime()
    if runtime is not None:
        runtime.cudaGetLastError()


def _runtime() -> Any:
    """CUDA's runtime as torch has loaded it, which has functions that `torch.cuda.cudart` leaves out; None without."""
    try:
        return ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}")
    except OSError:
        return None


def _driver() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
