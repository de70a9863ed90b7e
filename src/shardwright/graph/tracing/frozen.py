"""What a step reads of Python while it is captured: the graph holds it as it was, so that it is noted here.

Plain values that are read are told to who keeps programs, which makes another where they have changed. What a graph
cannot do, such as setting an attribute or drawing Python's random numbers, is warned of with its line.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from shardwright import torch_private
from shardwright.errors import CaptureError
from shardwright.graph.tracing import sources
from shardwright.graph.tracing.outside import MISSING, NOT_PLAIN, Place, plain, same, variables

# Torch's own bookkeeping in every module; only the flag of training decides what a forward does.
_OWN = frozenset({*vars(nn.Module()), *vars(nn.Module)}) - {"training"}


class FrozenWarning(UserWarning):
    """The step does something in Python that a captured graph does not do again."""


class RecomputationWarning(UserWarning):
    """A captured step keeps what activation checkpointing would compute anew."""


class Reading:
    """Watches one capture. ``traced`` is the copy of ``model`` that runs."""

    def __init__(self, model: nn.Module, traced: nn.Module, loss_fn: Callable[..., Any]) -> None:
        # By their dictionaries, which the exporter's stand-ins for modules share.
        self._owners = {id(vars(module)): owner for owner, module in traced.named_modules()}
        self._traced = traced
        self._attributes: dict[Place, None] = {}
        self._tensors_read: set[tuple[str, str]] = set()  # as they were before the step
        self._tensors_set: set[tuple[str, str]] = set()
        self.buffers_set: dict[str, str] = {}  # the path of a buffer -> at which line another stands in its place
        before = {place: plain(value) for place, value in variables(model, loss_fn)}
        self._variables = {place: value for place, value in before.items() if value is not NOT_PLAIN}
        self._now = partial(Place.now, model=model, loss_fn=loss_fn)
        self._warnings: dict[str, type[Warning]] = {}

    @property
    def places(self) -> tuple[Place, ...]:
        """Where the plain values stand that the graph may depend on, but for those that the step itself changes."""
        return (*self._attributes, *(place for place in self._variables if place not in self._changed()))

    def _changed(self) -> list[Place]:
        return [p for p, value in self._variables.items() if not same(plain(self._now(p)), value)]

    def warn(self) -> None:
        """Say what the graph will not do."""
        for place in self._changed():
            self._note(
                f"{place}, is changed by the loss function: a captured step does not do it again; change it outside "
                "of it, or keep it in a buffer of the model"
            )
        for text, category in self._warnings.items():
            warnings.warn(category(text), stacklevel=2)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """While the loss function runs. The generators of Python and NumPy are afterwards as they were before."""
        with ExitStack() as stack:
            stack.enter_context(self._attributes_watched())
            stack.enter_context(torch_private.checkpoints_call(self._checkpoint))
            stack.enter_context(self._random_watched(random, "random", random.getstate, random.setstate))
            stack.enter_context(
                self._random_watched(np.random, "numpy.random", np.random.get_state, np.random.set_state)
            )
            yield

    @contextmanager
    def _attributes_watched(self) -> Iterator[None]:
        write = nn.Module.__setattr__

        def reading(module: nn.Module, name: str) -> Any:
            value = object.__getattribute__(module, name)
            if name not in _OWN and not name.startswith("__"):
                owner = self._owners.get(id(object.__getattribute__(module, "__dict__")))
                computed = isinstance(getattr(type(module), name, None), property)
                is_tensor = isinstance(value, torch.Tensor) and not computed
                if owner is not None and is_tensor and (owner, name) not in self._tensors_set:
                    self._tensors_read.add((owner, name))
                if owner is not None and not computed and plain(value) is not NOT_PLAIN:
                    self._attributes.setdefault(Place("attribute", owner, name))
            return value

        def writing(module: nn.Module, name: str, value: Any) -> None:
            owner = self._owners.get(id(vars(module)))
            now = plain(value)
            if owner is not None and isinstance(value, torch.Tensor) and value is not vars(module).get(name):
                self._set_tensor(module, owner, name)
            if owner is not None and name not in _OWN and now is not NOT_PLAIN:
                before = vars(module).get(name, MISSING)
                if not same(plain(before), now):
                    self._note_write(Place("attribute", owner, name))
            write(module, name, value)

        nn.Module.__getattribute__ = reading  # type: ignore[method-assign, assignment]
        nn.Module.__setattr__ = writing  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            del nn.Module.__getattribute__
            nn.Module.__setattr__ = write  # type: ignore[method-assign]

    def _set_tensor(self, module: nn.Module, owner: str, name: str) -> None:
        """Raises `CaptureError` for a tensor that is no buffer, if the next step would read it."""
        if name in torch_private.buffers_in(module):
            self.buffers_set[".".join(filter(None, (owner, name)))] = _line()
        elif (owner, name) in self._tensors_read:
            raise CaptureError(
                f"{Place('attribute', owner, name)} is read by the step and then set to another tensor{_line()}: a "
                "captured model runs its graph, not this line, so that the next step would read the old one\n"
                f"Keep it in a buffer: self.register_buffer({name!r}, ...) in __init__."
            )
        self._tensors_set.add((owner, name))

    def _note_write(self, place: Place) -> None:
        self._note(
            f"{place} is set while the model runs{_line()}: a captured model runs its graph, not this line, so the "
            "value stays what it was; set it outside the loss function, or keep it in a buffer"
        )

    def _note(self, text: str, category: type[Warning] = FrozenWarning) -> None:
        self._warnings.setdefault(text, category)

    @contextmanager
    def _checkpoint(self, problem: str) -> Iterator[None]:
        """Around a function that activation checkpointing calls; ``problem`` is what torch says of it."""
        if problem:
            self._note(f"torch.utils.checkpoint: {problem}{_line()}", UserWarning)
        if torch.is_grad_enabled() and RecomputationWarning not in self._warnings.values():
            self._note(
                f"activation checkpointing saves no memory in a captured step{_line()}: the numbers are the same, and "
                "what would be computed anew in the backward is kept; sw.parallelize(recompute=...) saves it",
                RecomputationWarning,
            )
        before = self._versions()
        yield
        if torch.is_grad_enabled() and self._versions() != before:
            self._note(
                f"a checkpointed function changes buffers{_line()}: a captured step changes them once, as without "
                "checkpointing, while torch does it again in the backward, so that running statistics differ from "
                "those of torch with checkpointing",
                RecomputationWarning,
            )

    def _versions(self) -> list[int]:
        return [torch_private.version(buffer) for buffer in self._traced.buffers()]  # the exporter puts others in

    @contextmanager
    def _random_watched(
        self, module: Any, name: str, state: Callable[[], Any], set_state: Callable[[Any], Any]
    ) -> Iterator[None]:
        """Notice draws from the generator that the functions of ``module`` share."""
        before = state()
        shared = getattr(module, "_inst", None) or module.mtrand._rand
        names = [n for n, function in vars(module).items() if getattr(function, "__self__", None) is shared]
        functions = {n: getattr(module, n) for n in names if "state" not in n}

        def noticing(function: Callable[..., Any]) -> Callable[..., Any]:
            def draw(*args: Any, **kwargs: Any) -> Any:
                self._note_draw(name, _line())
                return function(*args, **kwargs)

            return draw

        try:
            with torch_private.replaced(module, {n: noticing(function) for n, function in functions.items()}):
                yield
        finally:
            if not _equal_states(before, state()):
                if not any(text.startswith(f"numbers of {name} ") for text in self._warnings):
                    self._note_draw(name, "")
                set_state(before)

    def _note_draw(self, name: str, line: str) -> None:
        self._note(
            f"numbers of {name} are drawn while the model runs{line}: a captured model draws them once, at the capture;"
            " draw with torch, whose random numbers are part of the graph, or outside the loss function and pass them "
            "in the batch"
        )


def _line() -> str:
    frame = sources.users_frame(sys._getframe(2))
    return f", at {frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""


def _equal_states(a: Any, b: Any) -> bool:
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(_equal_states, a, b))
    return bool(np.array_equal(a, b)) if isinstance(a, np.ndarray) else bool(a == b)


def frozen_tensors(
    constants: Mapping[str, torch.Tensor], found: Iterator[tuple[Place, torch.Tensor]]
) -> dict[str, Place]:
    """Where the tensors stand that a graph holds as constants, by the names that the graph has for them."""
    kept = [(place, t) for place, t in found if t.numel() and not torch_private.is_fake(t)]  # the trace sets others
    by_storage = {(t.data_ptr(), tuple(t.shape), t.stride()): place for place, t in kept}
    named = {name: by_storage.get((t.data_ptr(), tuple(t.shape), t.stride())) for name, t in constants.items()}
    return {name: place for name, place in named.items() if place is not None}
