"""The process group of the mpi backend: torch's collectives on an MPI communicator. `mpi.prepare` makes it known."""

from __future__ import annotations

import hashlib
import secrets
import sys
from collections.abc import Sequence
from typing import Any

from mpi4py import MPI
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined]  # documented, but not listed

from shardwright.common.torch_private import add_gloo_inside
from shardwright.distributed.backends import table
from shardwright.distributed.backends.group import CpuGroup, Steps, Task
from shardwright.distributed.backends.mpi_transfer import Transfer
from shardwright.distributed.backends.mpi_work import CollectiveQueue, Message, MpiWork, Watch
from shardwright.errors import UsageError, WorldError


class Job:
    """This process in its MPI job: it makes the process groups, and leaves the job when the process ends."""

    def __init__(self) -> None:
        self.watch: Watch | None = None

    def create(self, options: Any, _: Any) -> MpiGroup:
        """Return what torch calls for the world and for every group made later, on the group's members alone."""
        world = MPI.COMM_WORLD
        members = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        if members[options.group_rank] != world.Get_rank() or members[-1] >= world.Get_size():
            raise WorldError(
                f"rank {options.group_rank} of the group of ranks {list(members)} is rank {world.Get_rank()} of "
                f"{world.Get_size()} for MPI; the mpi backend keeps MPI's ranks"
            )
        if self.watch is None:
            self.watch = Watch(world.Get_rank(), options.store)
        tag = int.from_bytes(hashlib.sha256(options.group_id.encode()).digest()[:2])
        with_members = world.Get_group().Incl(members)
        comm = world.Create_group(with_members, tag)
        with_members.Free()
        queue = CollectiveQueue(options.group_id, members, options.timeout.total_seconds(), self.watch)
        group = MpiGroup(Transfer(comm), Transfer(comm.Dup()), queue)
        # torch gives the name of a group that has ended to the next one of the same ranks, and what stands in the store
        # under that name leads gloo to peers that are gone.
        once = comm.bcast(secrets.token_hex(8) if comm.Get_rank() == 0 else None)
        store = PrefixStore(once, options.store)
        add_gloo_inside(group, ProcessGroupGloo(store, group.rank(), group.size(), options.timeout))
        return group

    def leave(self) -> None:
        """At exit. A rank that dies of an exception ends the others, which would wait for it in vain."""
        if MPI.Is_finalized():
            return
        if getattr(sys, "last_value", None) is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            MPI.COMM_WORLD.Abort(1)
        if self.watch is not None:
            self.watch.leave()
        MPI.Finalize()


class MpiGroup(CpuGroup):
    """Ranks with a communicator for collectives and all that belongs to them, and another for messages."""

    def __init__(self, collectives: Transfer, messages: Transfer, queue: CollectiveQueue) -> None:
        super().__init__(table.MPI, collectives)
        self.collectives: Transfer = collectives
        self.messages, self.queue = messages, queue
        self._sent: list[Message] = []
        self._closed = False

    def shutdown(self) -> None:
        """Close the group after its pending collectives; every member must call this."""
        if self._closed:
            return
        self._closed = True
        self.queue.close()
        for transfer in (self.collectives, self.messages):
            transfer.comm.Free()

    def begin(self, what: str, outputs: Sequence[Tensor], task: Task, asynchronous: bool) -> MpiWork:
        return self.queue.run(what, outputs, task, asynchronous)

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> MpiWork:
        (tensor,) = tensors
        self.check_memory("send", tensor)
        whole = tensor.detach().contiguous()
        message = self.queue.message("send", whole, self.messages.send(whole, peer, tag), _nothing, peer)
        # Nobody need wait for what was sent, yet its memory must last until it is on its way.
        self._sent = [*(sent for sent in self._sent if not sent.is_completed()), message]
        return message

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> MpiWork:
        return self._receive(tensors, peer, tag, peer)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> MpiWork:
        if tensors[0].numel() > self.messages.largest_count:
            raise UsageError(
                f"recv without src= got a tensor of {tensors[0].numel()} elements, which come in several messages; "
                f"name the sender, or receive at most {self.messages.largest_count} elements"
            )
        return self._receive(tensors, MPI.ANY_SOURCE, tag, None)

    def _receive(self, tensors: Sequence[Tensor], source: int, tag: int, peer: int | None) -> MpiWork:
        (tensor,) = tensors
        self.check_memory("recv", tensor)
        target = tensor.detach()
        whole = target.contiguous()

        def finish() -> Steps:
            if whole.data_ptr() != target.data_ptr():
                target.copy_(whole)
            return ()

        return self.queue.message("recv", tensor, self.messages.receive(whole, source, tag), finish, peer)


def _nothing() -> Steps:
    return ()
