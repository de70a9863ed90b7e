"""Functions of users that bring a backward of their own: each is one operator of the graph.

While the step is traced, ``MyFunction.apply(...)`` runs its forward aside, on tensors without values, to learn what it
returns. The trace has one operator in its place, which carries an `Application`; `convert` gives it the name of the
class. Programs call the class again, so that autograd runs its backward on whatever they compute.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from shardwright.common import torch_private
from shardwright.compiler.capture.tracing import sources
from shardwright.compiler.capture.tracing.literals import literal
from shardwright.compiler.capture.tracing.replaced import call_checkpointed, functions_apply, is_checkpoint
from shardwright.compiler.rules.notation import Operand
from shardwright.compiler.rules.register import called, function_of, name_of
from shardwright.errors import CaptureError, ShardwrightError

APPLIED = "shardwright.apply_function.default"
# Operators that have a backward in Python are such functions inside torch; a graph has the operators themselves.
_OF_OPERATORS = ("torch._library.", "torch._higher_order_ops.")
_COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional")


@dataclass(frozen=True)
class Result:
    """A tensor that a function returns. ``carries`` says that it has a gradient where an operand has one."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str
    carries: bool


@dataclass(frozen=True)
class Application:
    """One call of a function.

    ``args`` are its arguments with an `Operand` for each tensor; ``autocast`` is the dtype of the autocast around it.
    """

    op: str
    args: tuple[Any, ...]
    results: tuple[Result, ...]
    autocast: torch.dtype | None

    def text(self) -> str:
        """The application as the argument of an operator."""
        return base64.b85encode(pickle.dumps(self)).decode()

    @staticmethod
    def read(text: str) -> Application:
        """The application of such an argument."""
        application: Application = pickle.loads(base64.b85decode(text))
        return application


@torch.library.custom_op("shardwright::apply_function", mutates_args=())
def _apply_function(operands: Sequence[torch.Tensor], application: str) -> list[torch.Tensor]:
    raise AssertionError("this operator stands for a function while a step is traced")


@_apply_function.register_fake
def _(operands: Sequence[torch.Tensor], application: str) -> list[torch.Tensor]:
    return [
        torch.empty_strided(result.shape, result.stride, dtype=result.dtype, device=result.device)
        for result in Application.read(application).results
    ]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.op = Application.read(inputs[1]).op


def _refuse_gradient(ctx: Any, *gradients: Any) -> Any:
    raise CaptureError(
        f"a gradient is taken through {called(ctx.op)} inside the loss function, at {sources.callers_place()}\n"
        "Write the forward of this function with torch's operators, whose backward is known while the step is captured."
    )


_apply_function.register_autograd(_refuse_gradient, setup_context=_remember)


@contextmanager
def captured() -> Iterator[None]:
    """Make each function that is applied meanwhile one operator of the trace."""
    with functions_apply(_Applied()):
        yield


class _Applied:
    """The stand-in for ``MyFunction.apply(*args)``."""

    def __init__(self) -> None:
        self._aside = False  # whether a forward runs: what it applies is part of it

    def __call__(self, function: Any, args: tuple[Any, ...]) -> Any:
        if self._aside or f"{function.__module__}.".startswith(_OF_OPERATORS):
            return torch_private.apply_function(function, args)
        if is_checkpoint(function):
            return call_checkpointed(args)
        where = sources.callers_place()
        _refuse_torchs_own(function, where)
        op = _name(function, where)
        _refuse_arguments(op, args, where)
        self._aside = True
        try:
            output, untaught = _Rehearsal(op, where).run(function, args)
        finally:
            self._aside = False
        tensors = [x.detach() if number in untaught else x for number, x in enumerate(_tensors(args))]
        return _traced(op, args, tensors, output)


def _traced(op: str, args: tuple[Any, ...], tensors: list[torch.Tensor], output: Any) -> Any:
    """Put one operator into the trace; ``output`` is what the function returns, with tensors that are not traced."""
    count = iter(range(len(tensors)))
    device = tensors[0].device.type if tensors else "cpu"
    results = _tensors(output)
    application = Application(
        op,
        tuple(Operand(next(count)) if isinstance(arg, torch.Tensor) else arg for arg in args),
        tuple(
            Result(tuple(map(int, t.shape)), tuple(map(int, t.stride())), t.dtype, t.device.type, t.requires_grad)
            for t in results
        ),
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None,
    )
    made = [
        tensor if result.carries or not tensor.requires_grad else tensor.detach()
        for tensor, result in zip(_apply_function(tensors, application.text()), application.results, strict=True)
    ]
    if not isinstance(output, tuple):
        return made[0]
    given = iter(made)
    return tuple(next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in output)


def _result(tensor: torch.Tensor) -> Result:
    sizes, strides = tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride()))  # numbers, also of open sizes
    return Result(sizes, strides, tensor.dtype, tensor.device.type, tensor.requires_grad)


@dataclass(frozen=True)
class _Rehearsal:
    """Runs a function aside, to learn what it returns and to see that ranks may run it."""

    op: str
    where: str

    def run(self, function: Any, args: tuple[Any, ...]) -> tuple[Any, frozenset[int]]:
        """Return what ``function`` returns for tensors like these, which have no values, and which have no gradient.

        These are the numbers of tensors that require one, for which the backward gives None.
        """
        with torch_private.untraced():
            given = tuple(_like(arg) if isinstance(arg, torch.Tensor) else arg for arg in args)
            try:
                with torch_private.OperatorMode(self._checked):
                    output = torch_private.apply_function(function, given)
            except ShardwrightError:
                raise
            except Exception as error:
                self._refuse_in_place(given)
                raise self._failed(error) from error
            self._refuse_in_place(given)
            if not _tensors(output):
                raise CaptureError(f"{called(self.op)} returns no tensor, at {self.where}")
            return output, self._without_gradient(_tensors(output), _tensors(given))

    def _without_gradient(self, results: list[torch.Tensor], given: list[torch.Tensor]) -> frozenset[int]:
        """Look at what the backward does, and return the numbers of what is given for which it gives None.

        It may need values, which are there when it is run in earnest.
        """
        results = [result for result in results if result.requires_grad]
        numbers = [number for number, tensor in enumerate(given) if tensor.requires_grad]
        if not results:
            return frozenset()
        try:
            with torch_private.OperatorMode(self._checked):
                like = [torch.empty_like(result) for result in results]
                gradients = torch.autograd.grad(results, [given[i] for i in numbers], like, allow_unused=True)
        except ShardwrightError:
            raise
        except Exception:
            return frozenset()
        return frozenset(number for number, found in zip(numbers, gradients, strict=True) if found is None)

    def _checked(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.Tag.nondeterministic_seeded in operator.tags:
            raise CaptureError(
                f"{called(self.op)} draws random numbers by {operator}, which would differ from rank to rank, at "
                f"{self.where}\nDraw them before it, and give them to apply() as a tensor."
            )
        if operator.namespace in _COLLECTIVES:
            raise CaptureError(
                f"{called(self.op)} communicates by {operator}, at {self.where}\nThe loss function gets the whole "
                "batch, as on one device: leave out what exchanges parts of it between ranks."
            )
        return operator(*args, **kwargs)

    def _refuse_in_place(self, given: tuple[Any, ...]) -> None:
        if any(map(torch_private.version, _tensors(given))):
            raise CaptureError(
                f"{called(self.op)} changes a tensor that it is given in place, at {self.where}\n"
                "Work on a copy within its forward: x = x.clone()."
            )

    def _failed(self, error: Exception) -> CaptureError:
        line = sources.source_in_traceback(error.__traceback__)
        reason = next((line for line in str(error).splitlines() if line.strip()), "no reason given")
        if "DataDependent" in type(error).__name__:
            why = f"its forward needs the value of a tensor, at {line}\n"
        else:
            why = f"{type(error).__name__}: {reason}, at {line}\n"
        return CaptureError(
            f"{called(self.op)} cannot be captured, at {self.where}\n{why}"
            "The forward runs once on tensors that have shapes but no values; choose by torch.where in it, not by if."
        )


def _tensors(given: Any) -> list[torch.Tensor]:
    """The tensors among arguments, or among what a function returns."""
    return [leaf for leaf in (given if isinstance(given, tuple) else (given,)) if isinstance(leaf, torch.Tensor)]


def _like(tensor: torch.Tensor) -> torch.Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return made.requires_grad_(tensor.requires_grad)


def _name(function: Any, where: str) -> str:
    """The name of a function, which leads back to it on any rank."""
    op = name_of(function)
    with suppress(CaptureError):
        if function_of(op) is function:
            return op
    raise CaptureError(
        f"{function.__qualname__} has a backward of its own and cannot be found by its name on every rank, at {where}\n"
        "Define it at the top level of a module, and not inside a function."
    )


def _refuse_torchs_own(function: Any, where: str) -> None:
    """Refuse functions of torch that a graph would keep the forward of alone."""
    if not f"{function.__module__}.".startswith("torch."):
        return
    if function.__name__ == "BackwardHookFunction":
        raise CaptureError(
            f"a module has a hook on its backward (register_full_backward_hook), at {where}\nRemove it, as the graph "
            "would forget it. Hooks of parameters are honoured, and a torch.autograd.Function of your own can change "
            "what flows back."
        )
    if f"{function.__module__}.".startswith("torch._functorch."):
        raise CaptureError(
            f"a torch.autograd.Function is applied inside a transform of torch.func, at {where}\n"
            "Apply it outside of vmap, grad and their like, or write its forward with torch's operators."
        )
    raise CaptureError(
        f"{function.__module__}.{function.__qualname__}, which is torch's own, has a backward that cannot be captured, "
        f"at {where}\nLeave it out of the model, or write what it computes with torch's operators."
    )


def _refuse_arguments(op: str, args: tuple[Any, ...], where: str) -> None:
    for number, arg in enumerate(args, 1):
        if not isinstance(arg, torch.Tensor) and literal(arg) is None:
            raise CaptureError(
                f"argument {number} of {called(op)}.apply is a {type(arg).__name__}, which a graph cannot keep, at "
                f"{where}\nGive it tensors, each an argument of its own, and numbers, words, dtypes, or lists of these."
            )
