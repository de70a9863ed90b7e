"""torch's process group on collectives in Python, which a backend brings.

The methods are those that torch's functions, DistributedDataParallel and the functional collectives of DTensor call;
whatever else torch asks a group for is answered by a gloo group inside it.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.distributed.backends.table import Backend, backend_called
from shardwright.errors import UsageError


def backends_of(group: dist.ProcessGroup | None = None) -> str:
    """Return the names of the backends that move a group's tensors: the requested ones, or a replacement."""
    asked = str(dist.get_backend(group))
    instead = backend_called(asked).instead
    return instead if instead and not isinstance(group or dist.group.WORLD, CpuGroup) else asked


class CpuGroup(dist.ProcessGroup):
    """Ranks with collectives on tensors of the CPU. A subclass says when these run, and moves messages."""

    def __init__(self, backend: Backend, collectives: Collectives) -> None:
        super().__init__(collectives.rank, collectives.size)  # type: ignore[call-arg]  # one of two overloads
        self.backend, self.collectives = backend, collectives

    def getBackendName(self) -> str:
        return self.backend.registered

    @abstractmethod
    def begin(self, what: str, outputs: Sequence[Tensor], task: Task, asynchronous: bool) -> dist.Work:
        """``task`` writes ``outputs``; unless ``asynchronous`` it has ended when this returns, or has raised."""

    def _run(
        self, what: str, outputs: Sequence[Tensor], task: Task, options: Any, read: Sequence[Tensor] = ()
    ) -> dist.Work:
        for tensor in (*outputs, *read):
            self.check_memory(what, tensor)
        return self.begin(what, outputs, task, options is None or options.asyncOp)

    # --- every rank gets the same; torch declares several signatures for most of these, which one method serves here

    def allreduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: timedelta | None = None) -> dist.Work:  # type: ignore[override]
        return self._all_reduce("all_reduce", _listed(tensors), opts, op)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        return self._all_reduce("all_reduce_coalesced", tensors, opts, None)

    def _all_reduce(self, what: str, tensors: Sequence[Tensor], opts: Any, op: Any) -> dist.Work:
        if isinstance(opts, dist.ReduceOp | type(dist.ReduceOp.SUM)):
            op, opts = opts, None
        wanted = op if op is not None else opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        pairs = [(tensor, self.collectives.reduction(wanted, tensor)) for tensor in tensors]

        def task() -> Steps:
            for tensor, reduction in pairs:
                yield from self.summed(tensor, reduction)

        return self._run(what, tensors, task, opts)

    def summed(self, tensor: Tensor, reduction: Any) -> Steps:
        """The steps of one of several all-reduces, or of one whose options are not given."""
        return self.collectives.all_reduce(tensor, reduction)

    def broadcast(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        root = opts if isinstance(opts, int) else opts.rootRank
        (tensor,) = _listed(tensors)
        options = None if isinstance(opts, int) else opts
        return self._run("broadcast", [tensor], lambda: self.collectives.broadcast(tensor, root), options)

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:  # type: ignore[override]
        return self._run("barrier", [], self.collectives.barrier, opts)

    # --- gathering

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:  # type: ignore[override]
        (tensor,) = _listed(inputs)
        gathered = list(outputs[0] if not isinstance(outputs[0], Tensor) else outputs)
        self._check_parts("all_gather", gathered, tensor)
        return self._run(
            "all_gather", gathered, lambda: self.collectives.all_gather_list(gathered, tensor), opts, [tensor]
        )

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        """``outputs[i]`` are the tensors of all ranks that belong to ``inputs[i]``."""
        for gathered, tensor in zip(outputs, inputs, strict=True):
            self._check_parts("all_gather_coalesced", gathered, tensor)

        def task() -> Steps:
            for gathered, tensor in zip(outputs, inputs, strict=True):
                yield from self.collectives.all_gather_list(gathered, tensor)

        return self._run("all_gather_coalesced", [t for ts in outputs for t in ts], task, opts, inputs)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        for output, tensor in zip(outputs, inputs, strict=True):
            self.check_whole("all_gather_into_tensor", "output", output, "input", tensor)

        def task() -> Steps:
            for output, tensor in zip(outputs, inputs, strict=True):
                yield from self.collectives.all_gather(output, tensor)

        return self._run("all_gather_into_tensor", outputs, task, opts, inputs)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:  # type: ignore[override]
        root = opts.rootRank
        (tensor,) = _listed(inputs)
        gathered = list(outputs[0]) if self.rank() == root else []
        if gathered:
            self._check_parts("gather", gathered, tensor)
        sent = {root: tensor}
        received = dict(enumerate(gathered))
        return self._run(
            "gather", gathered, lambda: self.collectives.exchange("gather", received, sent, root), opts, [tensor]
        )

    # --- reducing to one rank, or to parts

    def reduce(self, tensors: Any, opts: Any) -> dist.Work:  # type: ignore[override]
        (tensor,) = _listed(tensors)
        reduction = self.collectives.reduction(opts.reduceOp, tensor)
        return self._run("reduce", [tensor], lambda: self.collectives.reduce(tensor, opts.rootRank, reduction), opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:  # type: ignore[override]
        (output,) = _listed(outputs)
        parts = list(inputs[0] if not isinstance(inputs[0], Tensor) else inputs)
        self._check_parts("reduce_scatter", parts, output)
        reduction = self.collectives.reduction(opts.reduceOp, output)
        return self._run(
            "reduce_scatter", [output], lambda: self.collectives.reduce_scatter_list(output, parts, reduction), opts,
            parts,
        )  # fmt: skip

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        for output, tensor in zip(outputs, inputs, strict=True):
            self.check_whole("reduce_scatter_tensor", "input", tensor, "output", output)
        pairs = [
            (output, tensor, self.collectives.reduction(opts.reduceOp, output))
            for output, tensor in zip(outputs, inputs, strict=True)
        ]

        def task() -> Steps:
            for output, tensor, reduction in pairs:
                yield from self.collectives.reduce_scatter(output, tensor, reduction)

        return self._run("reduce_scatter_tensor", outputs, task, opts, inputs)

    # --- a part for each

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:  # type: ignore[override]
        root = opts.rootRank
        (output,) = _listed(outputs)
        parts = list(inputs[0]) if self.rank() == root else []
        if parts:
            self._check_parts("scatter", parts, output)
        sent = dict(enumerate(parts))
        return self._run(
            "scatter", [output], lambda: self.collectives.exchange("scatter", {root: output}, sent, root), opts, parts
        )

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        for name, tensors in (("outputs", outputs), ("inputs", inputs)):
            if len(tensors) != self.size():
                raise UsageError(f"all_to_all got {len(tensors)} {name}; expected one for each of {self.size()} ranks")
        received, sent = dict(enumerate(outputs)), dict(enumerate(inputs))
        return self._run(
            "all_to_all", outputs, lambda: self.collectives.exchange("all_to_all", received, sent), opts, inputs
        )

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int], opts: Any = None
    ) -> dist.Work:
        whole = output.contiguous()
        received = dict(enumerate(self._split("output", whole, output_sizes)))
        sent = dict(enumerate(self._split("input", tensor, input_sizes)))

        def task() -> Steps:
            yield from self.collectives.exchange("all_to_all", received, sent)
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

    # --- what was asked for makes sense

    def check_memory(self, what: str, tensor: Tensor) -> None:
        """Raise `UsageError` where this backend does not reach the tensor."""
        if not tensor.is_cpu or tensor.layout is not torch.strided:
            raise UsageError(
                f"the {self.backend.name} backend moves dense tensors on the CPU; {what} got a tensor on "
                f"{tensor.device} with the layout {tensor.layout}; move it with .cpu() or .to_dense(), or choose "
                "sw.init(backend='nccl') for GPUs"
            )

    def _check_parts(self, what: str, parts: Sequence[Tensor], own: Tensor) -> None:
        """One part for each rank, that of this rank as large as its own tensor, all of one dtype."""
        sizes = [part.numel() for part in parts]
        if len(parts) != self.size() or sizes[self.rank()] != own.numel() or {p.dtype for p in parts} != {own.dtype}:
            dtypes = ", ".join(sorted({str(part.dtype) for part in parts}))
            raise UsageError(
                f"{what} got a list of tensors with {sizes} elements of {dtypes}; expected {self.size()} tensors, one "
                f"for each rank, of {own.dtype}, that of rank {self.rank()} with {own.numel()} elements"
            )

    def check_whole(self, what: str, name: str, whole: Tensor, other: str, part: Tensor) -> None:
        """Raise `UsageError` where this backend does not reach both, or the whole has not the parts of all ranks."""
        self.check_memory(what, whole)
        self.check_memory(what, part)
        if whole.numel() != part.numel() * self.size() or whole.dtype != part.dtype:
            raise UsageError(
                f"{what} got an {name} of {whole.numel()} elements of {whole.dtype}; expected {self.size()} times the "
                f"{part.numel()} elements of {part.dtype} of the {other}"
            )


def _listed(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


Steps = Iterable[object]
"""A collective that begins when it is iterated over, and has ended when that has ended."""
Task = Callable[[], Steps]


class Collectives(Protocol):
    """Collectives on CPU tensors, which write into the tensors of their caller."""

    rank: int
    size: int

    def reduction(self, reduce_op: Any, tensor: Tensor) -> Any:
        """Return how such a tensor is reduced; raises `UsageError` where that has no meaning."""

    def barrier(self) -> Steps: ...

    def all_reduce(self, tensor: Tensor, reduction: Any) -> Steps: ...

    def reduce(self, tensor: Tensor, root: int, reduction: Any) -> Steps:
        """Into ``tensor`` of the root; that of another rank keeps its values."""

    def broadcast(self, tensor: Tensor, root: int) -> Steps: ...

    def all_gather(self, output: Tensor, tensor: Tensor) -> Steps:
        """``output`` has the elements of ``tensor`` from every rank, in the order of the ranks."""

    def all_gather_list(self, outputs: Sequence[Tensor], tensor: Tensor) -> Steps:
        """The tensors of all ranks, which may differ in size."""

    def reduce_scatter(self, output: Tensor, tensor: Tensor, reduction: Any) -> Steps:
        """``tensor`` has one part for every rank; this rank's, reduced over the ranks, goes to ``output``."""

    def reduce_scatter_list(self, output: Tensor, tensors: Sequence[Tensor], reduction: Any) -> Steps:
        """One tensor for every rank; they may differ in size."""

    def exchange(self, kind: str, outputs: Mapping[int, Tensor], inputs: Mapping[int, Tensor], root: int = 0) -> Steps:
        """Send ``inputs[r]`` to rank r and receive ``outputs[r]`` from it: all-to-all, gather and scatter."""


_ending = threading.Lock()  # where one thread asks for a future and another one ends the work


class CollectiveWork(dist.Work):
    """The handle of a collective; its future's value is the list of the tensors that it wrote."""

    def __init__(self, outputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.outputs = list(outputs)
        self._error: BaseException | None = None
        self._done = False
        self._future: torch.futures.Future[list[Tensor]] | None = None

    def end(self, error: BaseException | None = None) -> None:
        """It has ended, with that error or well."""
        with _ending:
            self._error, self._done, future = error, True, self._future
        if future is not None:
            self.deliver(future)

    def deliver(self, future: torch.futures.Future[list[Tensor]]) -> None:
        """Complete the future."""
        self.complete(future)

    def complete(self, future: torch.futures.Future[list[Tensor]]) -> None:
        """Set the future's result or error; its callbacks run here."""
        if self._error is None:
            future.set_result(self.outputs)
        else:
            future.set_exception(self._error)  # type: ignore[arg-type]  # declared as a result

    @property
    def ended(self) -> bool:
        """Return whether it has ended, well or not; nothing is done for it."""
        return self._done

    def ended_well(self) -> bool:
        """True; raises what the collective raised."""
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._done

    def is_success(self) -> bool:
        return self._done and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[Tensor]:
        self.wait()
        return self.outputs

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        with _ending:
            made = self._future is None
            if self._future is None:
                self._future = torch.futures.Future()
            done = self._done
        if made and done:
            self.complete(self._future)
        return self._future
