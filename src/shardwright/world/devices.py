"""Which host and which GPU each rank has, decided from the cards of all ranks, so that all decide alike."""

from __future__ import annotations

import os
from collections.abc import Sequence

from shardwright.errors import WorldError
from shardwright.world.meeting import Card, join_ranks


def host_names(cards: Sequence[Card]) -> tuple[str, ...]:
    """The host of every rank; hosts of the same name that are two machines are told apart by their boot."""
    machines = {(card.host, card.machine) for card in cards}
    names = [name for name, _ in machines]
    return tuple(card.host if names.count(card.host) == 1 else f"{card.host}/{card.machine[:8]}" for card in cards)


def gpu_index(cards: Sequence[Card], rank: int, device_id: int | None = None) -> int:
    """The index, among the GPUs that rank ``rank`` can see, of the one that it is to use.

    Every rank sees either all GPUs of its host that the job may use, and takes that of its local rank, or
    a single one that the launcher chose for it. ``device_id`` is a choice that the launcher made by number. Raises
    `WorldError`, on all ranks alike, when a host has more ranks than GPUs.
    """
    hosts = host_names(cards)
    for host in sorted(set(hosts)):
        local = [card for card in cards if hosts[card.rank] == host]
        gpus = {gpu for card in local for gpu in card.gpus}
        if len(gpus) < len(local):
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
            raise WorldError(
                f"{host} has {len(local)} ranks ({join_ranks([c.rank for c in local])}), but they see {len(gpus)} GPUs "
                f"(CUDA_VISIBLE_DEVICES={visible}); start at most {len(gpus)} ranks there, or pass "
                "sw.init(backend='gloo') to train on the CPUs"
            )
    mine = cards[rank]
    if device_id is not None:
        return _visible_index(device_id, len(mine.gpus))
    local_ranks = [card.rank for card in cards if hosts[card.rank] == hosts[rank]]
    local_rank = local_ranks.index(rank) if mine.local_rank is None else mine.local_rank
    if len(mine.gpus) == 1:
        return 0
    if local_rank >= len(mine.gpus):
        raise WorldError(
            f"{mine} has local rank {local_rank}, but sees only {len(mine.gpus)} GPUs; make CUDA_VISIBLE_DEVICES the "
            "same for all ranks of a host, or name one GPU for each"
        )
    return local_rank


def _visible_index(device_id: int, visible: int) -> int:
    """Where the device of that number stands among the visible ones."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    ids = listed.split(",") if listed else [str(i) for i in range(visible)]
    if str(device_id) not in ids[:visible]:
        raise WorldError(f"DEVICE_ID={device_id} is none of the visible devices {', '.join(ids[:visible])}")
    return ids.index(str(device_id))
