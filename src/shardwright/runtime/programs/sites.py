"""Tells the pulse of this rank what each collective of a local program is for, so that a hang can be explained.

The functions that a program calls are wrapped: each finds by the place of its call which instruction it is, says so
before it begins, and leaves a hook on the autograd node of its result that says so before the backward. Nothing is
wrapped where nobody watches.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any

from torch import Tensor

from shardwright.common.pulse import NOWHERE, Pulse, site
from shardwright.compiler.capture.ir import Node, Value
from shardwright.compiler.lower.program import LocalProgram

_NAMED = 3  # parameters of a bucket, or of a gather
_NO_LABELS = (NOWHERE, NOWHERE)


class Sites:
    """Tells the pulse what each collective of ``program`` is for.

    It runs as ``code``, the step of ``running``: the same, perhaps with stretches in place of some operators.
    """

    def __init__(self, program: LocalProgram, running: LocalProgram, code: CodeType, pulse: Pulse) -> None:
        self._program, self._code, self._pulse = program, code, pulse
        numbers = {id(instruction): at for at, instruction in enumerate(program.instructions)}
        self._labels = {
            line: labels(program, numbers[id(instruction)])
            for line, (_, instruction) in enumerate(running.lines, start=1)
            if id(instruction) in numbers
        }

    def watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, which tells for what it is called. From elsewhere than the program it tells nothing."""
        pulse, code = self._pulse, self._code
        hooks = {backward: _hook(pulse, backward) for _, backward in self._labels.values()}

        def watched_function(*args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            if frame.f_code is not code:
                return function(*args, **kwargs)
            forward, backward = self._labels.get(frame.f_lineno, _NO_LABELS)
            pulse.at(forward)
            result = function(*args, **kwargs)
            if callable(result):  # a collective under way
                return result
            first = result if isinstance(result, Tensor) else next(iter(result), None)
            if first is not None and first.grad_fn is not None:
                first.grad_fn.register_prehook(hooks[backward])
            return result

        return watched_function

    def watched_later(self, function: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
        """``function``, in whose backward each bucket is waited for."""
        found = {one.reads[0]: at for at, one in enumerate(self._program.instructions) if one.kind == "bucket"}
        waited = next((one.outputs for one in self._program.instructions if one.kind == "later"), ())
        buckets = [found[name] for name in waited if name in found]
        words = [_words(self._program, at)[1] for at in buckets]
        hooks = [_hook(self._pulse, site(text, 2 * len(self._program.instructions))) for text in words]

        def watched_function(*parameters: tuple[Tensor, ...]) -> list[Tensor]:
            result = function(*parameters)
            at = 0
            for bucket, hook in zip(parameters, hooks, strict=True):
                if (node := result[at].grad_fn) is not None:
                    node.register_prehook(hook)
                at += len(bucket)
            return result

        return watched_function

    def watched_members(self, module: ModuleType) -> SimpleNamespace:
        """The functions of ``module``, watched where they communicate."""
        members = {name: value for name, value in vars(module).items() if not name.startswith("_")}
        communicate = [
            name
            for name, value in members.items()
            if inspect.isfunction(value) and "comm" in inspect.signature(value).parameters
        ]
        return SimpleNamespace(**members | {name: self.watched(members[name]) for name in communicate})


def _hook(pulse: Pulse, label: bytes) -> Callable[[Any], None]:
    return lambda _: pulse.at(label)


def labels(program: LocalProgram, at: int) -> tuple[bytes, bytes]:
    """For what instruction ``at`` communicates, in the forward and in the backward, which comes the other way."""
    forward, backward = _words(program, at)
    return site(forward, at + 1), site(backward, 2 * len(program.instructions) - at)


def _words(program: LocalProgram, at: int) -> tuple[str, str]:
    instruction = program.instructions[at]
    if instruction.kind == "later":
        return "", ""  # `Sites.watched_later` tells of each bucket
    if instruction.kind == "late":
        read = (later for later, one in enumerate(program.instructions) if set(instruction.outputs) & set(one.reads))
        return "", _words(program, next(read))[1]
    several = instruction.kind in ("bucket", "joined") or len(instruction.moves) > 1
    if several and all(value.kind == "parameter" for value, _ in instruction.moves):
        names = [value.label for value, _ in instruction.moves]
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        named = f"{', '.join(names[:_NAMED])}{more}"
        return ("" if instruction.kind == "bucket" else named), f"the gradients of {named}"
    if instruction.kind == "in place":
        return "running statistics of batch norms", ""
    user = _user(program, at)
    value = instruction.moves[0][0] if instruction.kind in ("redistribution", "begin") else None
    used = "" if user is None else _name(user)
    sums = instruction.moves
    if sums and user is not None and program.loss in user.results and all(summed.shape == () for summed, _ in sums):
        used = "the loss"  # which is made of sums
    if value is not None and value.kind == "parameter":
        return f"{value.label}{f' in {used}' if used else ''}", f"the gradient of {value.label}"
    if not used and value is not None:
        used = _result(program, value)
    return used, f"the backward of {used}"


def _result(program: LocalProgram, value: Value) -> str:
    """Return what the program returns: the loss, a changed buffer, or an output beside the loss."""
    if value.name == program.loss:
        return "the loss"
    buffers = [buffer for buffer, new in program.mutations.items() if new == value.name]
    return f"the buffer {buffers[0]}" if buffers else f"the output {value.label}"


def _user(program: LocalProgram, at: int) -> Node | None:
    """The operator that instruction ``at`` is, or that waits for its result; None where the program returns it."""
    instructions = program.instructions
    while instructions[at].node is None:
        results = set(instructions[at].outputs)
        readers = (later for later in range(at + 1, len(instructions)) if results & set(instructions[later].reads))
        at = next(readers, -1)
        if at < 0:
            return None
    return instructions[at].node


def _name(node: Node) -> str:
    """The operator with where it stands, as "linear of layers.3.mlp"."""
    parts = node.op.split(".")
    return f"{parts[1] if len(parts) > 1 else node.op} of {node.scope or 'the loss function'}"
