"""The process group of the mpi backend: torch's collectives on an MPI communicator.

`mpi.prepare` makes it known to torch. The methods are those that torch's functions, DistributedDataParallel and the
functional collectives of DTensor call; whatever else torch asks a group for is answered by a gloo group inside it.
"""

from __future__ import annotations

import hashlib
import secrets
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # documented, but not listed

from shardwright.backends import table
from shardwright.backends.mpi_transfer import Task, Transfer
from shardwright.backends.mpi_work import Lane, Message, MpiWork, Watch
from shardwright.errors import UsageError, WorldError
from shardwright.torch_private import add_gloo_inside


class Job:
    """This process in its MPI job: it makes the process groups, and leaves the job when the process ends."""

    def __init__(self) -> None:
        self.watch: Watch | None = None

    def create(self, options: Any, _: Any) -> MpiGroup:
        """What torch calls for the world and for every group made later, on the group's members alone."""
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
        lane = Lane(options.group_id, members, options.timeout.total_seconds(), self.watch)
        group = MpiGroup(Transfer(comm), Transfer(comm.Dup()), lane)
        # torch gives the name of a group that has ended to the next one of the same ranks, and what stands in the store
        # under that name leads gloo to peers that are gone.
        once = comm.bcast(secrets.token_hex(8) if comm.Get_rank() == 0 else None)
        add_gloo_inside(group, PrefixStore(once, options.store), options.timeout)
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


class MpiGroup(dist.ProcessGroup):
    """Ranks with a communicator for collectives and all that belongs to them, and another for messages."""

    def __init__(self, collectives: Transfer, messages: Transfer, lane: Lane) -> None:
        super().__init__(collectives.rank, collectives.size)  # type: ignore[call-arg]  # one of two overloads
        self.collectives, self.messages, self.lane = collectives, messages, lane
        self._sent: list[Message] = []
        self._closed = False

    def getBackendName(self) -> str:
        return table.MPI.registered

    def shutdown(self) -> None:
        """After what has been asked for; every member must come."""
        if self._closed:
            return
        self._closed = True
        self.lane.close()
        for transfer in (self.collectives, self.messages):
            transfer.comm.Free()

    def _run(
        self, what: str, outputs: Sequence[Tensor], task: Task, options: Any, read: Sequence[Tensor] = ()
    ) -> MpiWork:
        for tensor in (*outputs, *read):
            _check_memory(what, tensor)
        return self.lane.run(what, outputs, task, options is None or options.asyncOp)

    # --- every rank gets the same; torch declares several signatures for most of these, which one method serves here

    def allreduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: timedelta | None = None) -> MpiWork:  # type: ignore[override]
        return self._all_reduce("all_reduce", _listed(tensors), opts, op)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> MpiWork:
        return self._all_reduce("all_reduce_coalesced", tensors, opts, None)

    def _all_reduce(self, what: str, tensors: Sequence[Tensor], opts: Any, op: Any) -> MpiWork:
        if isinstance(opts, dist.ReduceOp | type(dist.ReduceOp.SUM)):
            op, opts = opts, None
        wanted = op if op is not None else opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        pairs = [(tensor, self.collectives.reduction(wanted, tensor)) for tensor in tensors]

        def task() -> None:
            for tensor, reduction in pairs:
                self.collectives.all_reduce(tensor, reduction)

        return self._run(what, tensors, task, opts)

    def broadcast(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> MpiWork:
        root = opts if isinstance(opts, int) else opts.rootRank
        (tensor,) = _listed(tensors)
        options = None if isinstance(opts, int) else opts
        return self._run("broadcast", [tensor], lambda: self.collectives.broadcast(tensor, root), options)

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> MpiWork:  # type: ignore[override]
        return self._run("barrier", [], self.collectives.comm.Barrier, opts)

    # --- gathering

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> MpiWork:  # type: ignore[override]
        (tensor,) = _listed(inputs)
        gathered = list(outputs[0] if not isinstance(outputs[0], Tensor) else outputs)
        self._check_parts("all_gather", gathered, tensor)
        return self._run(
            "all_gather", gathered, lambda: self.collectives.all_gather_list(gathered, tensor), opts, [tensor]
        )

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> MpiWork:
        """``outputs[i]`` are the tensors of all ranks that belong to ``inputs[i]``."""
        for gathered, tensor in zip(outputs, inputs, strict=True):
            self._check_parts("all_gather_coalesced", gathered, tensor)

        def task() -> None:
            for gathered, tensor in zip(outputs, inputs, strict=True):
                self.collectives.all_gather_list(gathered, tensor)

        return self._run("all_gather_coalesced", [t for ts in outputs for t in ts], task, opts, inputs)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> MpiWork:
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> MpiWork:
        for output, tensor in zip(outputs, inputs, strict=True):
            self._check_whole("all_gather_into_tensor", "output", output, "input", tensor)

        def task() -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                self.collectives.all_gather(output, tensor)

        return self._run("all_gather_into_tensor", outputs, task, opts, inputs)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> MpiWork:  # type: ignore[override]
        root = opts.rootRank
        (tensor,) = _listed(inputs)
        gathered = list(outputs[0]) if self.rank() == root else []
        if gathered:
            self._check_parts("gather", gathered, tensor)
        sent = {root: tensor}
        received = dict(enumerate(gathered))
        return self._run("gather", gathered, lambda: self.collectives.exchange(received, sent), opts, [tensor])

    # --- reducing to one rank, or to parts

    def reduce(self, tensors: Any, opts: Any) -> MpiWork:  # type: ignore[override]
        (tensor,) = _listed(tensors)
        reduction = self.collectives.reduction(opts.reduceOp, tensor)
        return self._run("reduce", [tensor], lambda: self.collectives.reduce(tensor, opts.rootRank, reduction), opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> MpiWork:  # type: ignore[override]
        (output,) = _listed(outputs)
        parts = list(inputs[0] if not isinstance(inputs[0], Tensor) else inputs)
        self._check_parts("reduce_scatter", parts, output)
        reduction = self.collectives.reduction(opts.reduceOp, output)
        return self._run(
            "reduce_scatter", [output], lambda: self.collectives.reduce_scatter_list(output, parts, reduction), opts,
            parts,
        )  # fmt: skip

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> MpiWork:
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> MpiWork:
        for output, tensor in zip(outputs, inputs, strict=True):
            self._check_whole("reduce_scatter_tensor", "input", tensor, "output", output)
        pairs = [
            (output, tensor, self.collectives.reduction(opts.reduceOp, output))
            for output, tensor in zip(outputs, inputs, strict=True)
        ]

        def task() -> None:
            for output, tensor, reduction in pairs:
                self.collectives.reduce_scatter(output, tensor, reduction)

        return self._run("reduce_scatter_tensor", outputs, task, opts, inputs)

    # --- a part for each

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> MpiWork:  # type: ignore[override]
        root = opts.rootRank
        (output,) = _listed(outputs)
        parts = list(inputs[0]) if self.rank() == root else []
        if parts:
            self._check_parts("scatter", parts, output)
        sent = dict(enumerate(parts))
        return self._run("scatter", [output], lambda: self.collectives.exchange({root: output}, sent), opts, parts)

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> MpiWork:
        for name, tensors in (("outputs", outputs), ("inputs", inputs)):
            if len(tensors) != self.size():
                raise UsageError(f"all_to_all got {len(tensors)} {name}; expected one for each of {self.size()} ranks")
        received, sent = dict(enumerate(outputs)), dict(enumerate(inputs))
        return self._run("all_to_all", outputs, lambda: self.collectives.exchange(received, sent), opts, inputs)

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int], opts: Any = None
    ) -> MpiWork:
        whole = output.contiguous()
        received = dict(enumerate(self._split("output", whole, output_sizes)))
        sent = dict(enumerate(self._split("input", tensor, input_sizes)))

        def task() -> None:
            self.collectives.exchange(received, sent)
            if whole is not output:
                output.copy_(whole)

        return self._run("all_to_all_single", [output], task, opts, [tensor])

    def _split(self, name: str, tensor: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
        rows = len(tensor) if tensor.dim() else 0
        if sizes and (len(sizes) != self.size() or sum(sizes) != rows):
            raise UsageError(
                f"all_to_all_single got the {name} sizes {list(sizes)} for {rows} rows; expected {self.size()} sizes "
                "that sum to the rows"
            )
        if not sizes and rows % self.size():
            raise UsageError(
                f"all_to_all_single got {rows} {name} rows, which {self.size()} ranks cannot share evenly; pass the "
                f"{name} sizes"
            )
        return torch.split(tensor, list(sizes) or [rows // self.size()] * self.size())

    # --- messages

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> MpiWork:
        (tensor,) = tensors
        _check_memory("send", tensor)
        whole = tensor.detach().contiguous()
        message = self.lane.message("send", whole, self.messages.send(whole, peer, tag), _nothing, peer)
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
        _check_memory("recv", tensor)
        target = tensor.detach()
        whole = target.contiguous()

        def finish() -> None:
            if whole.data_ptr() != target.data_ptr():
                target.copy_(whole)

        return self.lane.message("recv", tensor, self.messages.receive(whole, source, tag), finish, peer)

    # --- what was asked for makes sense

    def _check_parts(self, what: str, parts: Sequence[Tensor], own: Tensor) -> None:
        """One part for each rank, that of this rank as large as its own tensor, all of one dtype."""
        sizes = [part.numel() for part in parts]
        if len(parts) != self.size() or sizes[self.rank()] != own.numel() or {p.dtype for p in parts} != {own.dtype}:
            dtypes = ", ".join(sorted({str(part.dtype) for part in parts}))
            raise UsageError(
                f"{what} got a list of tensors with {sizes} elements of {dtypes}; expected {self.size()} tensors, one "
                f"for each rank, of {own.dtype}, that of rank {self.rank()} with {own.numel()} elements"
            )

    def _check_whole(self, what: str, name: str, whole: Tensor, other: str, part: Tensor) -> None:
        if whole.numel() != part.numel() * self.size() or whole.dtype != part.dtype:
            raise UsageError(
                f"{what} got an {name} of {whole.numel()} elements of {whole.dtype}; expected {self.size()} times the "
                f"{part.numel()} elements of {part.dtype} of the {other}"
            )


def _listed(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _nothing() -> None:
    return


def _check_memory(what: str, tensor: Tensor) -> None:
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise UsageError(
            f"the mpi backend moves dense tensors on the CPU; {what} got a tensor on {tensor.device} with the layout "
            f"{tensor.layout}; move it with .cpu() or .to_dense(), or choose sw.init(backend='nccl') for GPUs"
        )
