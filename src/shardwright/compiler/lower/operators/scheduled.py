"""The forward and the backward of microbatches in turns, within the forward of a step: the schedules 1F1B and its kin.

A program that runs such a schedule reads like this on the last of two stages:

    pipe = stages.Pipe(comm, device)
    stages.expect(pipe, 0, [[((4, 8), torch.float32)], ...])
    anchor, w_whole = stages.fetch(pipe, [v, w], [...])
    (w_leaf,) = scheduled.leaves([w_whole])
    (loss_m0_zero,) = scheduled.zeros(pipe, [((), torch.float32)])
    ...
    (slope_m0,) = scheduled.slopes(loss_zero, [loss_m0_zero])
    (x_m0,) = scheduled.receive(pipe, 0, [((4, 8), torch.float32, True)])
    y_m0 = aten.linear.default(x_m0, w_leaf)
    ...
    scheduled.backward(pipe, [loss_m0], [slope_m0], None, [], 0, [x_m0])
    ...
    loss_of_all = scheduled.hand_out(pipe, 1, (), torch.float32, loss, [anchor, w_whole], [None, w_leaf], [v, w])

What microbatches read together is cut off from autograd: they add up gradients in the leaves. A loss is linear in what
the microbatches give it, with factors that the batch alone decides (a count of labels), so that its slope is known
before any of them: it is the gradient of the loss at zeros. Gradients of parameters are then ready when the forward of
the step ends, and its backward hands them out, times the gradient of the loss.

A schedule that does the gradients of weights apart (ZB-H1) has products in another form, whose backward gives the
gradients of activations alone, and an action that does the rest:

    y_m0 = scheduled.product(pipe, (1, 0), (1,), aten.linear.default, x_m0, w_leaf)
    ...
    scheduled.backward(pipe, [loss_m0], [slope_m0], None, [], 0, [x_m0])
    scheduled.weights(pipe, (1, 0))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.compiler.lower.operators.stages import Pipe, Shape
from shardwright.compiler.plan.pricing.schedule import UNDER_WAY
from shardwright.errors import UsageError

Key = tuple[int, int]
"""A stage and a microbatch."""
Function = Callable[..., Tensor]


def leaves(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the tensors as leaves of autograd, in which microbatches add up gradients."""
    if not torch.is_grad_enabled():
        return tuple(tensors)
    return tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors)


def zeros(pipe: Pipe, facts: Sequence[tuple[Shape, torch.dtype]]) -> tuple[Tensor, ...]:
    """Return zeros in place of what microbatches give the loss, of these shapes and dtypes."""
    grad = torch.is_grad_enabled()
    return tuple(torch.zeros(shape, dtype=dtype, device=pipe.device, requires_grad=grad) for shape, dtype in facts)


def slopes(loss: Tensor, parts: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Return the gradient of a loss for each of its ``parts``, None without autograd; leaves add up theirs."""
    if not (torch.is_grad_enabled() and loss.requires_grad):
        return (None,) * len(parts)
    torch.autograd.backward(loss)
    return tuple(part.grad for part in parts)


def receive(pipe: Pipe, source: int, facts: Sequence[tuple[Shape, torch.dtype, bool]]) -> tuple[Tensor, ...]:
    """Return what a stage on group ``source`` sends, as leaves of autograd.

    Args:
        facts: the shape and the dtype of each tensor, and whether it has a gradient.
    """
    grad = torch.is_grad_enabled()
    came = pipe.receive([(shape, dtype) for shape, dtype, _ in facts], source)
    return tuple(x.requires_grad_(grad and has) for x, (_, _, has) in zip(came, facts, strict=True))


def send(pipe: Pipe, to: int, *tensors: Tensor) -> None:
    """Send tensors to a stage on group ``to``; `backward` waits for their gradients."""
    pipe.wait(False, left=UNDER_WAY)
    pipe.send(tensors, to)


def backward(
    pipe: Pipe,
    parts: Sequence[Tensor],
    slopes: Sequence[Tensor | None],
    following: int | None,
    sent: Sequence[Tensor],
    before: int | None,
    came: Sequence[Tensor],
) -> None:
    """Do the backward of a microbatch in a stage, where autograd is on.

    Args:
        parts: what it gives the loss, with the gradients that it has, the ``slopes``.
        sent: what it has sent to a stage on group ``following``, which sends gradients.
        came: what a stage on group ``before`` has sent, and is sent gradients of.
    """
    if not torch.is_grad_enabled():
        return
    ends = [(part, slope) for part, slope in zip(parts, slopes, strict=True) if slope is not None]
    if sent:
        assert following is not None
        answer = [(tuple(tensor.shape), tensor.dtype) for tensor in sent]
        ends += zip(sent, pipe.receive(answer, following, backward=True), strict=True)
    ends = [(tensor, gradient) for tensor, gradient in ends if tensor.requires_grad]
    if ends:
        torch.autograd.backward([tensor for tensor, _ in ends], [gradient for _, gradient in ends])
    if came:
        assert before is not None
        pipe.wait(True, left=UNDER_WAY)
        pipe.send([pipe.given(x.grad, tuple(x.shape), x.dtype) for x in came], before, backward=True)
        for x in came:
            x.grad = None
    for part in parts:
        with suppress(RuntimeError):  # of a view, which keeps its graph
            part.detach_()  # until all parts are added up its graph would keep what came


def product(pipe: Pipe, key: Key, weights: Sequence[int], function: Function, *args: Any, **kwargs: Any) -> Tensor:
    """Return ``function(*args, **kwargs)``, whose backward leaves the gradients of weights to `weights`.

    Args:
        key: the stage and the microbatch.
        weights: the places of those among the arguments.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    kept = {at: args[at] for at in weights}  # in a dictionary autograd does not see them
    others = [None if at in kept else arg for at, arg in enumerate(args)]
    anchor = torch.empty(0, device="cpu", requires_grad=True)  # the backward comes here also where nothing else has one
    made: Tensor = _Product.apply(anchor, pipe, key, partial(function, **kwargs), kept, *others)  # type: ignore[no-untyped-call]
    return made


class _Product(torch.autograd.Function):
    """A function with a graph of its own, from which its gradients are taken in two parts."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, pipe: Pipe, key: Key, function: Function, weights: Mapping[int, Tensor], *args: Any
    ) -> Tensor:
        given = [_alone(weights.get(at, arg)) for at, arg in enumerate(args)]
        with torch.enable_grad():
            made = function(*given)
        ctx.pipe, ctx.key, ctx.weights, ctx.given, ctx.made = pipe, key, weights, given, made
        return made.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        weights, given, made = ctx.weights, ctx.given, ctx.made
        ctx.given = ctx.made = None
        places = [at for at, wanted in enumerate(ctx.needs_input_grad[5:]) if wanted]
        inputs = [given[at] for at in places]
        found = iter(torch.autograd.grad(made, inputs, gradient, retain_graph=True) if inputs else ())

        trained = [at for at in weights if given[at].requires_grad]

        def rest() -> None:
            gradients = torch.autograd.grad(made, [given[at] for at in trained], gradient)
            torch.autograd.backward([weights[at] for at in trained], gradients)

        if trained:
            ctx.pipe.defer(ctx.key, rest)
        return None, None, None, None, None, *(next(found) if at in places else None for at in range(len(given)))


def _alone(arg: Any) -> Any:
    """Return a tensor cut off from autograd, which has a gradient of its own; anything else as it is."""
    return arg.detach().requires_grad_(arg.requires_grad) if isinstance(arg, Tensor) else arg


def weights(pipe: Pipe, key: Key) -> None:
    """Add up the gradients of weights that the backward of a microbatch in a stage has left."""
    for rest in pipe.deferred(key):
        rest()


def hand_out(
    pipe: Pipe,
    owner: int,
    shape: Shape,
    dtype: torch.dtype,
    loss: Tensor | None,
    cut: Sequence[Tensor],
    leaves: Sequence[Tensor | None],
    parts: Sequence[Tensor],
) -> Tensor:
    """Return the loss of group ``owner`` on all ranks; its backward hands out the gradients that are ready.

    Args:
        cut: what was cut off from autograd, and what ends the exchange of parameters, which has no leaf.
        leaves: what stood for each of them.
        parts: the parameters as this rank stores them.
    """
    pipe.wait_for_all()
    value = pipe.broadcast(owner, shape, dtype, loss)
    trained = [part for part in parts if part.requires_grad]
    if not (torch.is_grad_enabled() and trained):
        return value
    ends, gradients = [], []
    for whole, leaf in zip(cut, leaves, strict=True):
        gradient = torch.zeros_like(whole) if leaf is None else leaf.grad
        if whole.requires_grad and gradient is not None:
            ends.append(whole)
            gradients.append(gradient)
    found = torch.autograd.grad(ends, trained, gradients, allow_unused=True)
    handed: Tensor = _HandOut.apply(value, found, *trained)  # type: ignore[no-untyped-call]
    return handed


class _HandOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: Sequence[Tensor | None], *parts: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.view_as(loss)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        found, ctx.gradients = ctx.gradients, None
        if found is None:
            raise UsageError(
                "the gradients of this step were handed out before, and a schedule in turns has them once; type "
                "schedule='gpipe' for a second backward of one loss"
            )
        return None, None, *(None if x is None else x.mul_(gradient) for x in found)
