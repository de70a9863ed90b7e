"""Refuses what is no graph of known shapes, with the user's line and the remedy."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch

from shardwright.common import torch_private
from shardwright.compiler.capture.tracing import sources
from shardwright.errors import CaptureError, StrategyError

_BRANCHES = {"__bool__", "is_nonzero", "equal", "allclose", "__contains__"}
_NUMBERS = {"item", "__float__", "__int__", "__index__", "__complex__", "tolist", "numpy", "__array__", "__format__"}


def needs_value(name: str, args: Sequence[Any]) -> bool:
    """Check whether a function needs the value of a tensor that has none during a capture."""
    return (name in _BRANCHES or name in _NUMBERS) and torch_private.has_no_value(args[0])


def refuse_reading(name: str, args: Sequence[Any], where: str) -> None:
    """Refuse functions that need the value of a tensor that has none during a capture."""
    if name in _BRANCHES and torch_private.has_no_value(args[0]):
        raise CaptureError(
            f"a Python branch depends on the value of a tensor, at {where}\n"
            "Choose with torch.where(condition, a, b) instead of if; where one way only raises an error, write it so: "
            "if condition: raise ..., or assert condition."
        )
    if name in _NUMBERS and torch_private.has_no_value(args[0]):
        raise CaptureError(
            f"{name.strip('_')}() needs the value of a tensor while the model is captured, at {where}\n"
            "Keep it a tensor; to read it after the step, return it beside the loss: (loss, value)."
        )


def refuse_backward(function: Any, where: str) -> None:
    """Refuse a backward that leaves its gradients at the parameters."""
    if function is torch.Tensor.backward or function is torch.autograd.backward:
        raise CaptureError(
            f"backward() is called inside the loss function, at {where}\n"
            "Return the loss, and call backward() on what the parallel model returns; for a gradient within the loss, "
            "use torch.autograd.grad(..., create_graph=True)."
        )


@contextmanager
def transforms_refused() -> Iterator[None]:
    """Refuse the transforms of ``torch.func`` that take gradients, before they begin."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise CaptureError(
            "a transform of torch.func takes a gradient inside the loss function, which cannot be captured, at "
            f"{sources.callers_place()}\nUse torch.autograd.grad(..., create_graph=True), which is captured."
        )

    with torch_private.patched("transforms", **dict.fromkeys(torch_private.PATCHES["transforms"].names, refuse)):
        yield


def refuse_freezing(function: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], where: str) -> None:
    """Refuse to freeze a parameter for a part of the step: a graph takes gradients of all of it or of nothing."""
    sets = function is torch.Tensor.requires_grad.__set__  # type: ignore[attr-defined]
    if sets or name == "requires_grad_":
        wanted = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
        if isinstance(args[0], torch.nn.Parameter) and args[0].requires_grad != wanted:
            raise CaptureError(
                f"requires_grad of a parameter is set while the model is captured, at {where}\n"
                "Set it outside of the loss function; for a part of the step, give that part parameters without a "
                "gradient: torch.func.functional_call(module, {n: p.detach() for n, p in module.named_parameters()}, x)"
                "."
            )


def refuse_hooks(name: str, where: str) -> None:
    """Refuse hooks on tensors of the step, which a graph of the forward does not have."""
    if name in ("register_hook", "register_post_accumulate_grad_hook", "retain_grad"):
        raise CaptureError(
            f"{name}() of a tensor is called while the model is captured, at {where}: the graph would forget it\n"
            "Scale or clip what flows back by operators of the forward, or register hooks on the parameters of what "
            "sw.parallelize returns."
        )


def refuse_generator(name: str, args: Sequence[Any], where: str) -> None:
    """Refuse generators, of which a graph knows neither the state nor whose part of the batch it draws for."""
    if any(isinstance(arg, torch.Generator) for arg in args):
        raise StrategyError(
            f"{name}() is given a torch.Generator, from which ranks would draw other numbers than one device, "
            f"at {where}\n"
            "Leave generator= out: random numbers then follow from the seed of torch.manual_seed before "
            "sw.parallelize, the step and the place in the whole tensor. Or draw them outside of the loss function and "
            "pass them in with the batch."
        )


@contextmanager
def seeding_refused() -> Iterator[None]:
    """While the loss function runs: a graph would not set the seed again at its next step."""

    def refusing(name: str) -> Callable[..., Any]:
        def refuse(*_: Any) -> Any:
            raise StrategyError(
                f"torch.{name}() is called while the model is captured, which would not make steps draw equal numbers, "
                f"at {sources.callers_source()}\n"
                "Call it before sw.parallelize. Numbers that are to be the same at every step are drawn once, outside "
                "of the loss function."
            )

        return refuse

    with torch_private.patched("seeds", manual_seed=refusing("manual_seed"), seed=refusing("seed")):
        yield


def refuse_closed_over(args: Sequence[Any], where: str) -> None:
    """Refuse parameters that are not the model's: a graph would hold them as constants."""
    for arg in args:
        if isinstance(arg, (tuple, list)):
            refuse_closed_over(arg, where)
        elif isinstance(arg, torch.Tensor) and arg.requires_grad and not torch_private.is_fake(arg):
            raise CaptureError(
                f"the loss function uses a parameter of shape {list(arg.shape)} that is not one of the model it is "
                f"given, at {where}\nUse the model that the loss function gets as its first argument, and make modules "
                "with parameters, such as a learned loss, submodules of it."
            )


class ChangesParameterError(CaptureError):
    """The step changes a parameter by what its own samples are, which ranks would do differently, captured or not."""


def refuse_max_norm(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], where: str) -> None:
    """Refuse tables of which a lookup changes the rows that it reads."""
    max_norm = kwargs.get("max_norm", args[3] if len(args) > 3 else None) if name in _LOOKUPS else None
    if max_norm is not None:
        raise ChangesParameterError(
            f"max_norm= changes the rows of a table that a batch looks up, at {where}: each rank would change those of "
            "its own samples\nLeave it out, and after optimizer.step() change all rows, on every rank: with "
            f"torch.no_grad(): weight.copy_(torch.renorm(weight, 2.0, 0, {max_norm}))"
        )


_LOOKUPS = ("embedding", "embedding_bag")


def refuse_compiled(model: torch.nn.Module) -> None:
    """Refuse what `torch.compile` returns: it would be compiled for the whole batch."""
    if hasattr(model, "_orig_mod"):
        raise CaptureError("the model is compiled; give the model that torch.compile was given")


def refuse_unknown_shape(name: str, result: Any, where: str) -> None:
    """Refuse results whose shape is known only when their values are."""
    tensors = result if isinstance(result, (tuple, list)) else (result,)
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and any(map(torch_private.is_unknown, tensor.shape)):
            raise _unknown_shape(name, where)


def refuse_unknown_classes(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], where: str) -> None:
    """Refuse `F.one_hot` that looks at the largest class."""
    if name == "one_hot" and kwargs.get("num_classes", args[1] if len(args) > 1 else -1) == -1:
        raise _unknown_shape(name, where)


_SELECTIONS = "Keep the shape fixed: torch.where(mask, x, 0), or a product with the mask, instead of a selection."
_PLACES = (
    "Keep the shape fixed: count with mask.sum(), choose with torch.where(mask, x, 0), and let each expert compute all "
    "rows, with weight 0 for those that are not its own."
)
# What to write in place of a function whose shape depends on values; `_SELECTIONS` where nothing else is said.
_FIXED: Mapping[str, str] = {
    "nonzero": _PLACES,
    "where": _PLACES,
    "argwhere": _PLACES,
    "unique": "Make it outside of the loss function and pass it in the batch, or ask which of n values there are: "
    "F.one_hot(x, n).amax(0).",
    "bincount": "Count with F.one_hot(x, n).sum(0), n being the number of values that there can be.",
    "one_hot": "Say how many classes there are: F.one_hot(x, n).",
    "repeat_interleave": "Say how long the result is: x.repeat_interleave(times, dim, output_size=n).",
    "arange": "Take a size that the batch's shape gives, such as x.size(1), and mask what is too much.",
    "_pack_padded_sequence": "Run the layer over the padded batch: what stands before a sequence's end does not see "
    "the padding, out[torch.arange(n), lengths - 1] is its last step. Of a layer that also runs backwards this holds "
    "for the forward half alone.",
}


def _unknown_shape(name: str, where: str) -> CaptureError:
    what = {"__getitem__": "an index by a mask", "_pack_padded_sequence": "pack_padded_sequence"}.get(name, name)
    return CaptureError(
        f"the shape that {what} gives depends on the values of a tensor, at {where}\n{_FIXED.get(name, _SELECTIONS)}"
    )


_HINT = "If the line is right on one device, write it with tensor operations of fixed shapes."
# Errors of Python itself, which one device gives as well.
_MISTAKES = (AttributeError, ImportError, IndexError, KeyError, NameError)


# Errors of the exporter about values that it does not have, whose texts speak of its symbols.
_NO_VALUE = ("GuardOnDataDependentSymNode", "PendingUnbackedSymbolNotFound", "DataDependentOutputException")


FLEX_ATTENTION = (
    "flex_attention cannot be captured{at}\n"
    "Use F.scaled_dot_product_attention with attn_mask=create_mask(mask_mod, None, None, queries, keys, "
    "device=x.device) of torch.nn.attention.flex_attention, made in the model: a causal one becomes is_causal=True. "
    "What a score_mod adds is an attn_mask of numbers; models of transformers take attn_implementation='sdpa'."
)
_FLEX_FILE = "nn/attention/flex_attention.py"


def explained(error: Exception, failed: str) -> CaptureError:
    """The error of a capture that failed somewhere else, ``failed`` being where the first function did."""
    where = failed or sources.source_in_traceback(error.__traceback__)
    node = None if where else _executed_node(error.__traceback__)
    where = where if node is None else sources.source_of(node)
    at = f", at {where}" if where else ""
    if any(sources.path_in_torch(each.filename) == _FLEX_FILE for each in traceback.extract_tb(error.__traceback__)):
        return CaptureError(FLEX_ATTENTION.format(at=at))
    if type(error).__name__ == "DynamicOutputShapeException":
        return _unknown_shape(str(vars(error)["func"]), where)
    if type(error).__name__ in _NO_VALUE:
        return CaptureError(
            f"a shape or a branch depends on the values of a tensor{at}\n"
            "Keep shapes fixed, and choose with torch.where(condition, a, b)."
        )
    reason = next((line for line in str(error).splitlines() if line.strip()), "no reason given")
    if reason.startswith("Tensor dtype mismatch!"):
        return CaptureError(
            f"under autocast an operator gives another dtype than torch's trace sees{at}\n"
            f"{reason}\nCall the module where autocast is off, with torch.autocast(..., enabled=False), or leave out "
            ".float(), .to(dtype) and the like of what it returns."
        )
    if reason.startswith("A view was created in no_grad mode"):
        return CaptureError(
            "a view made under torch.no_grad(), or what it looks into, is changed in place where gradients are on"
            f"{at}\n"
            "Write .clone() behind what is made under torch.no_grad(): in a graph the results of recurrent layers are "
            "views, too."
        )
    hint = "" if isinstance(error, _MISTAKES) else f"\n{_HINT}"
    return CaptureError(f"the model cannot be captured{at}\n{type(error).__name__}: {reason}{hint}")


_ELSEWHERE = (
    "Choose what does without it, where there is a choice: another implementation (attn_implementation='sdpa' or "
    "'eager' of transformers), other options, batches that are padded to one length. With mode='data' a model that "
    "cannot be captured runs by torch's DistributedDataParallel, where its loss is a mean over samples."
)


def of_installed(error: CaptureError, trace: TracebackType | None, model: torch.nn.Module) -> CaptureError:
    """Return the error with other advice where it arose in an installed package, whose lines users do not change.

    Args:
        trace: where it arose.
        model: the one that was traced, whose module is named.
    """
    frames = sources.users_frames(trace)
    package = sources.package_of(frames[-1].f_code.co_filename) if frames else ""
    what, _, advice = str(error).rpartition("\n")
    if not package or not what or isinstance(error.__cause__, _MISTAKES):
        return error
    names = {id(module): name for name, module in model.named_modules() if name}
    modules = [names[id(frame.f_locals["self"])] for frame in frames if id(frame.f_locals.get("self")) in names]
    inside = f", in {modules[-1]} of the model" if modules else ""
    own = [frame for frame in frames if not sources.package_of(frame.f_code.co_filename)]
    called = f", called at {sources.describe_frame(own[-1])}" if own else ""
    sure = f"{advice}\n" if advice == _HINT else ""
    return type(error)(f"{what}\n{sure}The line is one of {package}{inside}{called}\n{_ELSEWHERE}")


def _executed_node(trace: TracebackType | None) -> torch.fx.Node | None:
    """Return the node of a graph that was executed innermost where an error arose, which no attribute of it tells."""
    found = None
    while trace is not None:
        node = trace.tb_frame.f_locals.get("n") if trace.tb_frame.f_code.co_name == "run_node" else None
        found = node if isinstance(node, torch.fx.Node) else found
        trace = trace.tb_next
    return found
