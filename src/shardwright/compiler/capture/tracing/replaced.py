"""The stand-ins for functions of torch while a step is traced; `torch_private.PATCHES` says why.

They stand in the place of torch's for the whole process. What other threads call does what it always does.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import get_ident
from types import ModuleType
from typing import Any

import torch
from torch.utils import checkpoint as checkpointing

from shardwright.common.torch_private import TorchDispatchMode, apply_function, code_when_asked, patched

# Loggers that tell of errors which are raised anyway.
_TELLING = (
    "fx.experimental.symbolic_shapes", "fx.experimental.recording", "_subclasses.fake_tensor", "export._trace",
    "_export.non_strict_utils",
)  # fmt: skip
_CHECKPOINT = checkpointing.CheckpointFunction


@contextmanager
def replaced(module: ModuleType, names: Mapping[str, Any]) -> Iterator[None]:
    """Let names of a module that is not torch's stand for other things."""
    before = {name: getattr(module, name) for name in names}
    vars(module).update(names)
    try:
        yield
    finally:
        vars(module).update(before)


@contextmanager
def checkpoints_call(around: Callable[[str], AbstractContextManager[None]]) -> Iterator[None]:
    """Let ``torch.utils.checkpoint.checkpoint`` call its function and recompute nothing.

    The function is called within ``around(problem)``, which gets what torch warns of, "" where that is nothing.
    """

    class Reentrant:
        @staticmethod
        def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            # Torch makes gradients of the arguments, and none of the parameters where no argument needs one.
            needed = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
            lost = torch.is_grad_enabled() and not needed
            problem = "None of the inputs have requires_grad=True. Gradients will be None" if lost else ""
            with around(problem), torch.no_grad() if lost else nullcontext():
                return function(*args)

    def without_reentrant(function: Any, preserve: bool, context_fn: Any, *_: Any, **__: Any) -> Iterator[None]:
        context, _ = context_fn()
        chooses_what_is_kept = isinstance(context, TorchDispatchMode)
        with around(""), nullcontext() if chooses_what_is_kept else context:
            yield

    names = {"CheckpointFunction": Reentrant, "_checkpoint_without_reentrant_generator": without_reentrant}
    with patched("checkpoint", **names):
        yield


def is_checkpoint(function: Any) -> bool:
    """Check whether a function with a backward of its own is torch's activation checkpointing."""
    return function is _CHECKPOINT


def call_checkpointed(args: tuple[Any, ...]) -> Any:
    """Call the function of activation checkpointing as `checkpoints_call` has it, whoever asked for it."""
    return checkpointing.CheckpointFunction.apply(*args)  # type: ignore[no-untyped-call]


@contextmanager
def functions_apply(apply: Callable[[Any, tuple[Any, ...]], Any]) -> Iterator[None]:
    """Let ``MyFunction.apply(*args)`` be ``apply(MyFunction, args)`` in this thread."""
    thread = get_ident()

    def applied(function: Any, *args: Any) -> Any:
        return apply(function, args) if get_ident() == thread else apply_function(function, args)

    with patched("functions", apply=classmethod(applied)):
        yield


@contextmanager
def batch_norms_call(instead: Callable[[Any, Any], Any]) -> Iterator[None]:
    """Let batch norms without a momentum call ``instead(module, x)`` in training, in this thread.

    Their running statistics are averages over all batches.
    """
    thread = get_ident()

    def called(module: Any, input: Any) -> Any:  # torch's own name, by which it may be called
        reads = module.momentum is None and module.training and module.track_running_stats
        if not reads or module.num_batches_tracked is None or module.running_mean is None or get_ident() != thread:
            return before["forward"](module, input)
        module._check_input_dim(input)
        return instead(module, input)

    with patched("batch norms", forward=called) as before:
        yield


# By recurrent layer, on which devices autocast casts for its kernel: those of oneDNN and of cuDNN.
_CAST_FOR = {"lstm": ("cpu", "cuda"), "gru": ("cuda",), "rnn_tanh": ("cuda",), "rnn_relu": ("cuda",)}


@contextmanager
def recurrent_layers_cast() -> Iterator[None]:
    """Let recurrent layers under autocast cast what they are given, in this thread, so that results have its dtype.

    Autocast casts for kernels that a trace has other operators for. Packed sequences, and LSTMs of a CPU with
    projections, have none.
    """
    thread = get_ident()

    def casting(name: str) -> Callable[..., Any]:
        plain = getattr(torch, name)

        def called(x: torch.Tensor, hidden: Any, weights: Any, *others: Any) -> Any:
            device, states = x.device.type, hidden if isinstance(hidden, (tuple, list)) else [hidden]
            by_kernel = device in _CAST_FOR[name] and isinstance(weights, list) and x.dtype != torch.float64
            if get_ident() != thread or not by_kernel or not torch.is_autocast_enabled(device):
                return plain(x, hidden, weights, *others)
            if device == "cpu" and weights[0].shape[0] // 4 != weights[1].shape[1]:  # with projections
                return plain(x, hidden, weights, *others)
            dtype = torch.get_autocast_dtype(device)
            x, *cast = (each.to(dtype) for each in (x, *states, *weights))
            given = cast[: len(states)] if name == "lstm" else cast[0]
            return plain(x, given, cast[len(states) :], *others)

        return called

    with patched("recurrent layers", **{name: casting(name) for name in _CAST_FOR}):
        yield


@contextmanager
def sizes_written_as_numbers(is_users: Callable[[str], bool]) -> Iterator[None]:
    """Let open sizes be the numbers of the trace where the user's files write them."""

    def written(size: torch.SymInt) -> Any:
        return repr(int(size)) if is_users(sys._getframe(1).f_code.co_filename) else before["__repr__"](size)

    with patched("sizes", __repr__=written) as before:
        yield


@contextmanager
def quiet_exporter() -> Iterator[None]:
    """Let the exporter tell nothing of errors that are raised anyway, nor write what nobody reads."""
    loggers = [logging.getLogger(f"torch.{name}") for name in _TELLING]
    disabled = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        with (
            patched("exporter", print=lambda *_, **__: None),
            patched("stack traces", do_not_emit_stack_traces=True),
            code_when_asked(),
        ):
            yield
    finally:
        for logger, before in zip(loggers, disabled, strict=True):
            logger.disabled = before
