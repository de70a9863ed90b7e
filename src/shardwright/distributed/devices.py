"""The host and the GPU of each rank, computed on every rank from the cards of all ranks, with the same result."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import get_args

import torch

from shardwright.common.words import describe_ranks
from shardwright.distributed.backends.table import BACKENDS, DeviceType, moves, on_gpus
from shardwright.distributed.meeting import Card
from shardwright.errors import UsageError, WorldError


def host_names(cards: Sequence[Card]) -> tuple[str, ...]:
    """The host of every rank; hosts of the same name that are two machines are told apart by their boot."""
    machines = {(card.host, card.machine) for card in cards}
    names = [name for name, _ in machines]
    return tuple(card.host if names.count(card.host) == 1 else f"{card.host}/{card.machine[:8]}" for card in cards)


def gpu_index(cards: Sequence[Card], rank: int, device_id: int | None = None, shared: bool = False) -> int:
    """The index, among the GPUs that rank ``rank`` can see, of the one that it is to use.

    Every rank sees either all GPUs of its host that the job may use, and takes that of its local rank, or
    a single one that the launcher chose for it. ``device_id`` is a choice that the launcher made by number. Raises
    `WorldError`, on all ranks alike, when a host has more ranks than GPUs, unless ranks may have one ``shared``.
    """
    hosts = host_names(cards)
    for host in sorted(set(hosts)):
        local = [card for card in cards if hosts[card.rank] == host]
        gpus = {gpu for card in local for gpu in card.gpus}
        if not gpus or (len(gpus) < len(local) and not shared):
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
            raise WorldError(
                f"{host} has {len(local)} ranks ({describe_ranks(card.rank for card in local)}), but they see "
                f"{len(gpus)} GPUs (CUDA_VISIBLE_DEVICES={visible}); start at most {len(gpus)} ranks there, or pass "
                "sw.init(backend='gloo') to train on the CPUs, with device='cuda' beside it to share GPUs"
            )
    mine = cards[rank]
    if device_id is not None:
        return _visible_index(device_id, len(mine.gpus))
    local_ranks = [card.rank for card in cards if hosts[card.rank] == hosts[rank]]
    local_rank = local_ranks.index(rank) if mine.local_rank is None else mine.local_rank
    if len(mine.gpus) == 1:
        return 0
    if shared:
        return local_rank % len(mine.gpus)
    if local_rank >= len(mine.gpus):
        raise WorldError(
            f"{mine} has local rank {local_rank}, but sees only {len(mine.gpus)} GPUs; make CUDA_VISIBLE_DEVICES the "
            "same for all ranks of a host, or name one GPU for each"
        )
    return local_rank


def _visible_index(device_id: int, visible: int) -> int:
    """Return the index, among the visible devices, of the device with that number."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    ids = listed.split(",") if listed else [str(i) for i in range(visible)]
    if str(device_id) not in ids[:visible]:
        raise WorldError(f"DEVICE_ID={device_id} is none of the visible devices {', '.join(ids[:visible])}")
    return ids.index(str(device_id))


def asked_device(device: str | torch.device | None) -> torch.device | None:
    """Return the device type that a caller requested; raises `UsageError` where ranks cannot compute on it."""
    if device is None:
        return None
    try:
        asked = torch.device(device)
    except (RuntimeError, TypeError):
        asked = None
    if asked is None or asked.type not in get_args(DeviceType):
        raise UsageError(f"device={device!r} is none that ranks compute on; expected 'cpu', 'cuda' or 'cuda:N'")
    return torch.device("cpu") if asked.type == "cpu" else asked


def device_type(asked: torch.device | None, backend: str) -> DeviceType:
    """Return the device type of ranks with this backend: the requested one, else the usual one of the backend.

    Raises `UsageError` where the backend moves no tensors of such devices, `WorldError` where there are none.
    """
    if asked is None:
        return "cuda" if on_gpus(backend) else "cpu"
    if not moves(asked.type, backend):
        fitting = " or ".join(repr(row.name) for row in BACKENDS.values() if asked.type in row.moves)
        raise UsageError(
            f"device={str(asked)!r}, but the backend {backend!r} moves no tensors from there; choose backend={fitting}"
        )
    count = torch.cuda.device_count() if asked.type == "cuda" else 1
    if count <= (asked.index or 0):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
        raise WorldError(
            f"device={str(asked)!r}, but torch sees {count} GPUs here (CUDA_VISIBLE_DEVICES={visible}); choose one "
            "that is there, or device='cpu'"
        )
    return "cuda" if asked.type == "cuda" else "cpu"
