"""What the programs of pipeline stages do with each other, and with the microbatches that they work through.

A program that has stages reads like this on the second of three:

    pipe = stages.Pipe(comm, device)
    stages.expect(pipe, 0, [[((4, 8), torch.float32)], ...])
    micro_0 = stages.at(comm, (("dp", 2), ("micro", 2)), 0)
    anchor, w_here = stages.fetch(pipe, [v, w], [...])
    came_0, x_m0 = stages.receive(pipe, anchor, [((4, 8), torch.float32, True)])
    y_m0 = aten.linear.default(x_m0, w_here)
    sent_0 = stages.send(pipe, anchor, [True], y_m0)
    ...
    loss_all = stages.finish(pipe, 2, (), torch.float32, None, [anchor, came_0, sent_0, ...])

Each stage sends what is made before it and read behind it to the next one alone, all values of a microbatch together,
so that two stages exchange their messages in one order. Everything is an autograd function: the backward of `receive`
sends a gradient, that of `send` waits for one. Autograd takes what was made last first, so that the backward goes
through the microbatches from the last to the first on all stages: the schedule of GPipe (Huang et al., 2019).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.compiler.mesh.collectives import Axes, Communicator
from shardwright.compiler.mesh.layout import chunk
from shardwright.compiler.mesh.mesh import MICROBATCHES, PIPELINE, Axis, Mesh
from shardwright.compiler.plan.pricing.schedule import UNDER_WAY

Shape = tuple[int, ...]
Message = Sequence[tuple[Shape, torch.dtype]]
"""The shape and the dtype of each tensor that one stage sends to another together."""


class Pipe:
    """The neighbours of a stage, to whom it sends within one step, forward and backward."""

    def __init__(self, comm: Communicator, device: torch.device) -> None:
        self.comm, self.device = comm, device
        self.stage, self.count = comm.mesh.coordinates(comm.rank)[PIPELINE], comm.mesh.sizes[PIPELINE]
        self._sent: dict[bool, deque[list[Callable[[], None]]]] = {False: deque(), True: deque()}
        self._deferred: dict[tuple[int, int], list[Callable[[], None]]] = {}
        # By the stage that sends, and whether backward: what was asked for, and what is to be.
        self._asked: defaultdict[tuple[int, bool], deque[list[Callable[[], Tensor]]]] = defaultdict(deque)
        self._expected: defaultdict[tuple[int, bool], deque[Message]] = defaultdict(deque)
        self.answers: list[Message] = []
        """What the next stage answers with to what it was sent, in that order: gradients for autograd."""

    def send(self, tensors: Sequence[Tensor], to: int, backward: bool = False) -> None:
        """Begin to send tensors to another stage, as one message."""
        begun = [self.comm.send(tensor.detach().contiguous(), PIPELINE, to, backward) for tensor in tensors]
        self._sent[backward].append(begun)

    def expect(self, source: int, messages: Iterable[Message], backward: bool = False) -> None:
        """Say which messages another stage sends next, so that they are asked for while this one computes.

        gloo moves a message once its reader has asked for it, so that `UNDER_WAY` are. On GPUs none is: NCCL does what
        two ranks begin one after the other, and a message that was not sent could hold up another that is to be.
        """
        if self.device.type == "cpu":
            self._expected[source, backward].extend(messages)
            self._ask_for_next(source, backward)

    def _ask_for_next(self, source: int, backward: bool) -> None:
        asked, expected = self._asked[source, backward], self._expected[source, backward]
        while expected and len(asked) < UNDER_WAY:
            asked.append(self._ask(expected.popleft(), source, backward))

    def _ask(self, message: Message, source: int, backward: bool) -> list[Callable[[], Tensor]]:
        empty = [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in message]
        return [self.comm.start_receive(tensor, PIPELINE, source, backward) for tensor in empty]

    def receive(self, message: Message, source: int, backward: bool = False) -> list[Tensor]:
        """Wait for the tensors of another stage's next message, which is one like this."""
        asked = self._asked[source, backward]
        begun = asked.popleft() if asked else self._ask(message, source, backward)
        self._ask_for_next(source, backward)
        return [finish() for finish in begun]

    def wait(self, backward: bool, left: int = 0) -> None:
        """Wait until of all messages that were sent, forward or backward, at most so many are ``left`` under way."""
        sent = self._sent[backward]
        while len(sent) > left:
            for finish in sent.popleft():
                finish()

    def defer(self, key: tuple[int, int], rest: Callable[[], None]) -> None:
        """Leave a part of the backward of a stage and a microbatch for later."""
        self._deferred.setdefault(key, []).append(rest)

    def deferred(self, key: tuple[int, int]) -> list[Callable[[], None]]:
        """Return the parts that were left, in that order, and forget them."""
        return self._deferred.pop(key, [])

    def wait_for_all(self) -> None:
        """Wait until all that was sent has gone."""
        self.wait(False)
        self.wait(True)

    def given(self, gradient: Tensor | None, shape: Shape, dtype: torch.dtype) -> Tensor:
        """Return a gradient, zeros where there is none."""
        return torch.zeros(shape, dtype=dtype, device=self.device) if gradient is None else gradient

    def broadcast(self, owner: int, shape: Shape, dtype: torch.dtype, tensor: Tensor | None) -> Tensor:
        """Return on every stage what the stage ``owner`` has; the others give None."""
        given = torch.zeros(shape, dtype=dtype, device=self.device) if tensor is None else tensor.detach()
        return self.comm.all_gather(given.contiguous(), (PIPELINE,))[owner].clone()


class _Microbatch:
    """The communicator of a rank within one microbatch, on the mesh of the plan, which has an axis for these."""

    def __init__(self, comm: Communicator, mesh: Mesh, number: int) -> None:
        at = comm.mesh.coordinates(comm.rank)
        self.mesh = mesh
        self.rank = mesh.rank_at({name: number if name == MICROBATCHES else at[name] for name in mesh.names})
        self.prepare, self.close = comm.prepare, comm.close
        self.all_reduce, self.start_all_reduce = comm.all_reduce, comm.start_all_reduce
        self.all_gather, self.start_all_gather = comm.all_gather, comm.start_all_gather
        self.reduce_scatter, self.start_reduce_scatter = comm.reduce_scatter, comm.start_reduce_scatter
        self.all_to_all, self.exchange_rows = comm.all_to_all, comm.exchange_rows
        self.start_shift = comm.start_shift
        self.send, self.start_receive = comm.send, comm.start_receive


def at(comm: Communicator, axes: tuple[tuple[str, int], ...], number: int) -> Communicator:
    """Return the communicator for a microbatch on the mesh of these axes, of which one is that of microbatches."""
    return _Microbatch(comm, _mesh(axes), number)


@lru_cache(maxsize=64)
def _mesh(axes: tuple[tuple[str, int], ...]) -> Mesh:
    """Cached by names and sizes, all that a mesh without links is made of."""
    return Mesh(tuple(Axis(name, size) for name, size in axes))


def rows(x: Tensor, dim: int, start: int, stop: int) -> Tensor:
    """Return the rows of a microbatch."""
    return x.narrow(dim, start, stop - start)


def detached(x: Tensor) -> Tensor:
    """Return a tensor whose gradient another microbatch gives."""
    return x.detach()


def total(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of what the microbatches have made, in their order."""
    return reduce(torch.add, parts)


def joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Return the rows of all microbatches."""
    return torch.cat(tuple(parts), dim)


def broadcast(pipe: Pipe, owner: int, shape: Shape, dtype: torch.dtype, x: Tensor | None) -> Tensor:
    """Return on every stage what ``owner`` has made, without a gradient."""
    return pipe.broadcast(owner, shape, dtype, x)


# Parameters: held by the one stage that computes with them, or sharded over all and brought to those that do.


class Parameter(NamedTuple):
    """A parameter as the ranks of all stages hold it.

    ``dim``, of ``size`` rows, is sharded over the stages, or held by the ``holder`` alone; None: each holds the whole.
    ``readers`` are the stages that compute with it. Its gradient is summed over ``axes``, in ``summed_in`` if that is
    not its own dtype; it is ``trained`` where it has one.
    """

    dim: int | None
    size: int
    readers: tuple[int, ...]
    axes: Axes
    summed_in: torch.dtype | None
    trained: bool
    holder: int | None = None

    @property
    def moves(self) -> bool:
        """Return whether stages send it to each other."""
        return self.dim is not None and (self.holder is None or not {self.holder}.issuperset(self.readers))

    def rows(self, stage: int, stages: int) -> tuple[int, int]:
        """The rows [start, stop) that a stage stores."""
        if self.holder is not None:
            return (0, self.size) if stage == self.holder else (0, 0)
        return chunk(0, self.size, stages, stage)

    def shape(self, part: Tensor, stage: int, stages: int) -> Shape:
        """The shape of what a stage stores; ``part`` is what this one does."""
        assert self.dim is not None
        start, stop = self.rows(stage, stages)
        return (*part.shape[: self.dim], stop - start, *part.shape[self.dim + 1 :])


def fetch(pipe: Pipe, parts: Sequence[Tensor], facts: Sequence[tuple[Any, ...]]) -> tuple[Tensor, ...]:
    """Return a scalar, and the parameters with which this stage computes, whole over the stages.

    All stages call it with their parts of all parameters. In the backward the stages that computed with a parameter
    send each its rows of the gradient, which are added up. The scalar has a gradient wherever there are any: `finish`
    takes it, so that the backward comes here on all ranks, and last of all.
    """
    found: tuple[Tensor, ...] = _Fetch.apply(pipe, tuple(Parameter(*each) for each in facts), *parts)  # type: ignore[no-untyped-call]
    return found


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pipe: Pipe, facts: tuple[Parameter, ...], *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.pipe, ctx.facts, ctx.parts = pipe, facts, [part.detach() for part in parts]
        ctx.set_materialize_grads(False)
        moved = [number for number, fact in enumerate(facts) if fact.moves]
        wholes = _gathered(pipe, facts, ctx.parts, moved)
        read = [number for number, fact in enumerate(facts) if pipe.stage in fact.readers]
        found = {n: wholes[n] if n in wholes else parts[n].view_as(parts[n]) for n in read}
        ctx.mark_non_differentiable(*(found[n] for n in read if not facts[n].trained))
        return torch.zeros((), device=pipe.device), *found.values()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor | None, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        pipe, facts, parts = ctx.pipe, ctx.facts, ctx.parts
        pipe.wait_for_all()
        read = [number for number, fact in enumerate(facts) if pipe.stage in fact.readers]
        own = dict(zip(read, gradients, strict=True))
        found: dict[int, Tensor] = {}
        for number in (n for n, fact in enumerate(facts) if fact.trained and (n in own or fact.dim is None)):
            gradient, fact = own.get(number), facts[number]
            shape = parts[number].shape if fact.dim is None else _whole_shape(fact, parts[number])
            found[number] = parts[number].new_zeros(shape) if gradient is None else gradient
        _sum(pipe, facts, found)
        moved = [number for number, fact in enumerate(facts) if fact.moves and fact.trained]
        found |= _scattered(pipe, facts, parts, moved, found)
        elsewhere = {n: torch.zeros_like(parts[n]) for n, fact in enumerate(facts) if fact.trained and n not in found}
        found |= elsewhere  # of what other stages hold, no rows: a gradient on all ranks, or on none
        return None, None, *(found[n] if fact.trained else None for n, fact in enumerate(facts))


def _whole_shape(fact: Parameter, part: Tensor) -> Shape:
    assert fact.dim is not None
    return (*part.shape[: fact.dim], fact.size, *part.shape[fact.dim + 1 :])


def _gathered(
    pipe: Pipe, facts: Sequence[Parameter], parts: Sequence[Tensor], moved: Sequence[int]
) -> dict[int, Tensor]:
    """Return those of the parameters that move between stages which this stage reads, whole."""
    stages = range(pipe.count)

    def shapes(source: int, to: int) -> dict[int, Shape]:
        return {n: facts[n].shape(parts[n], source, pipe.count) for n in moved if to in facts[n].readers}

    def piece(number: int, to: int) -> Tensor:
        return parts[number]

    pieces = _exchanged(pipe, parts, shapes, piece)
    return {
        n: torch.cat([pieces[source][n] for source in stages], facts[n].dim or 0)
        for n in moved
        if pipe.stage in facts[n].readers
    }


def _scattered(
    pipe: Pipe,
    facts: Sequence[Parameter],
    parts: Sequence[Tensor],
    moved: Sequence[int],
    gradients: dict[int, Tensor],
) -> dict[int, Tensor]:
    """Return this stage's rows of the sum of gradients, which the stages have that computed with the parameters."""

    def shapes(source: int, to: int) -> dict[int, Shape]:
        return {n: facts[n].shape(parts[n], to, pipe.count) for n in moved if source in facts[n].readers}

    def piece(number: int, to: int) -> Tensor:
        start, stop = facts[number].rows(to, pipe.count)
        return gradients[number].narrow(facts[number].dim or 0, start, stop - start)

    pieces = _exchanged(pipe, parts, shapes, piece)
    return {n: total([pieces[source][n] for source in facts[n].readers]) for n in moved}


def _exchanged(
    pipe: Pipe,
    parts: Sequence[Tensor],
    shapes: Callable[[int, int], dict[int, Shape]],
    piece: Callable[[int, int], Tensor],
) -> list[dict[int, Tensor]]:
    """Return what each stage has for this one of each parameter, all of one dtype in one collective.

    Args:
        shapes: of what a stage sends to another, by the number of the parameter.
        piece: what this stage sends of a parameter to another.
    """
    stages, own = range(pipe.count), pipe.stage
    found: list[dict[int, Tensor]] = [{} for _ in stages]
    found[own] = {number: piece(number, own).clone() for number in shapes(own, own)}
    for dtype in dict.fromkeys(part.dtype for part in parts):
        sent = {
            (s, to): {n: f for n, f in shapes(s, to).items() if parts[n].dtype == dtype} if s != to else {}
            for s in stages
            for to in stages
        }
        longest = max(sum(torch.Size(f).numel() for f in each.values()) for each in sent.values())
        flats = []
        for to in stages if longest else ():
            pieces = [piece(n, to).reshape(-1) for n in sent[own, to]]
            flat = torch.zeros(longest, dtype=dtype, device=pipe.device)
            if pieces:
                joined = torch.cat(pieces)
                flat[: len(joined)] = joined
            flats.append(flat)
        came = (
            pipe.comm.all_to_all(flats, (PIPELINE,))
            if longest
            else [parts[0].new_zeros(0, dtype=dtype) for _ in stages]
        )
        for source, flat in enumerate(came):
            wanted = sent[source, own]
            length = [torch.Size(f).numel() for f in wanted.values()]
            taken = torch.split(flat[: sum(length)], length) if wanted else ()
            found[source] |= {n: t.view(f) for (n, f), t in zip(wanted.items(), taken, strict=True)}
    return found


def _sum(pipe: Pipe, facts: Sequence[Parameter], gradients: dict[int, Tensor]) -> None:
    """Sum gradients over the ranks that have addends of them: those of one stage, or of all if all hold the whole."""
    together: dict[tuple[Axes, torch.dtype], list[int]] = {}
    for number, gradient in gradients.items():
        fact = facts[number]
        axes = (PIPELINE, *fact.axes) if fact.dim is None else fact.axes
        if axes:
            together.setdefault((axes, fact.summed_in or gradient.dtype), []).append(number)
    for (axes, dtype), numbers in together.items():
        flat = torch.cat([gradients[number].reshape(-1).to(dtype) for number in numbers])
        pipe.comm.all_reduce(flat, axes)
        lengths = [gradients[number].numel() for number in numbers]
        for number, piece in zip(numbers, torch.split(flat, lengths), strict=True):
            gradients[number] = piece.view_as(gradients[number]).to(gradients[number].dtype)


# Values from stage to stage.


def expect(pipe: Pipe, source: int, messages: Sequence[Message], backward: bool = False) -> None:
    """Say which messages a stage on group ``source`` sends in this step, in order; none backward without autograd."""
    if torch.is_grad_enabled() or not backward:
        pipe.expect(source, messages, backward)


def receive(pipe: Pipe, anchor: Tensor, facts: Sequence[tuple[Shape, torch.dtype, bool]]) -> tuple[Tensor, ...]:
    """Return a scalar for `finish`, and what the stage before sends, which waits for gradients of some in any case.

    Args:
        facts: the shape and the dtype of each tensor, and whether it has a gradient.
    """
    found: tuple[Tensor, ...] = _Receive.apply(pipe, tuple(facts), anchor)  # type: ignore[no-untyped-call]
    return found


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, pipe: Pipe, facts: tuple[tuple[Shape, torch.dtype, bool], ...], anchor: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.pipe, ctx.facts = pipe, facts
        ctx.set_materialize_grads(False)
        found = tuple(pipe.receive([(shape, dtype) for shape, dtype, _ in facts], pipe.stage - 1))
        ctx.mark_non_differentiable(*(x for x, (_, _, trained) in zip(found, facts, strict=True) if not trained))
        return torch.zeros((), device=pipe.device), *found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor | None, *gradients: Tensor | None) -> tuple[None, ...]:
        trained = [(x, fact) for x, fact in zip(gradients, ctx.facts, strict=True) if fact[2]]
        ctx.pipe.send([ctx.pipe.given(x, shape, dtype) for x, (shape, dtype, _) in trained], ctx.pipe.stage - 1, True)
        return None, None, None


def send(pipe: Pipe, anchor: Tensor, trained: Sequence[bool], *tensors: Tensor) -> Tensor:
    """Send tensors to the next stage; return a scalar for `finish`, in whose backward their gradients come back."""
    sent: Tensor = _Send.apply(pipe, tuple(trained), anchor, *tensors)  # type: ignore[no-untyped-call]
    return sent


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pipe: Pipe, trained: tuple[bool, ...], _: Tensor, *tensors: Tensor) -> Tensor:
        ctx.pipe, ctx.trained = pipe, trained
        ctx.answer = [(t.shape, t.dtype) for t, has in zip(tensors, trained, strict=True) if has]
        pipe.answers.append(ctx.answer)
        pipe.send(tensors, pipe.stage + 1)
        return torch.zeros((), device=pipe.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        came = iter(ctx.pipe.receive(ctx.answer, ctx.pipe.stage + 1, backward=True))
        return None, None, None, *(next(came) if has else None for has in ctx.trained)


def wait(pipe: Pipe) -> None:
    """Wait until all that this stage has sent has gone, where no loss does."""
    pipe.wait_for_all()


def finish(
    pipe: Pipe, owner: int, shape: Shape, dtype: torch.dtype, loss: Tensor | None, ends: Sequence[Tensor]
) -> Tensor:
    """Return the loss of the stage ``owner`` on all stages; its backward is that of each stage."""
    found: Tensor = _Finish.apply(pipe, owner, shape, dtype, loss, *ends)  # type: ignore[no-untyped-call]
    return found


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, pipe: Pipe, owner: int, shape: Shape, dtype: torch.dtype, loss: Tensor | None, *ends: Tensor
    ) -> Tensor:
        ctx.has, ctx.count, ctx.pipe = loss is not None, len(ends), pipe
        pipe.wait_for_all()
        return pipe.broadcast(owner, shape, dtype, loss)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        pipe = ctx.pipe
        pipe.expect(pipe.stage + 1, reversed(pipe.answers), backward=True)
        ends = [torch.zeros((), device=pipe.device) for _ in range(ctx.count)]
        return None, None, None, None, gradient if ctx.has else None, *ends
