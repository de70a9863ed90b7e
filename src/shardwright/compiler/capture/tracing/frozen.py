"""Notes the Python values that a step reads while it is captured, since the graph holds them as they were.

Plain values that are read are told to who keeps programs, which makes another where they have changed. What a graph
cannot do is refused with its line where numbers depend on it, as on Python's random numbers, and warned of otherwise.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from shardwright.common import torch_private
from shardwright.compiler.capture.tracing.outside import safe
from shardwright.compiler.capture.tracing.outside.code import StepCode
from shardwright.compiler.capture.tracing.outside.entries import OF_TORCH
from shardwright.compiler.capture.tracing.outside.objects import ObjectReads
from shardwright.compiler.capture.tracing.outside.places import Place
from shardwright.compiler.capture.tracing.outside.values import MISSING, NOT_PLAIN, comparable, plain, same
from shardwright.compiler.capture.tracing.replaced import checkpoints_call, replaced
from shardwright.compiler.capture.tracing.sources import callers_line
from shardwright.compiler.capture.tracing.state.origins import Origins
from shardwright.compiler.capture.tracing.state.replay import Again
from shardwright.compiler.capture.tracing.state.seen import Name, Seen
from shardwright.compiler.capture.tracing.state.side_effects import Left, equal_states
from shardwright.compiler.capture.tracing.state.verdict import DRAWN_ONCE, Judged, judged, lost
from shardwright.errors import CaptureError

_DEFAULT_RNG = np.random.default_rng


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
        self._seen, self.origins = Seen(), Origins()
        step = StepCode(model, loss_fn)
        self.begins = partial(Left, model, traced, step)
        self._tensors = partial(step.tensors, traced)
        self._left: list[Judged] = []
        before = {place: comparable(value) for place, value in (*step.variables(), *step.members())}
        self._objects = ObjectReads(traced, step)
        self._variables = {place: value for place, value in before.items() if value is not NOT_PLAIN}
        self._now = partial(Place.now, model=model, loss_fn=loss_fn)
        self._warnings: dict[str, type[Warning]] = {}
        self._drawn: dict[str, str] = {}  # whose random numbers were drawn, and at which line

    @property
    def places(self) -> tuple[Place, ...]:
        """Return where plain values stand that the graph may depend on, without those that the step itself changes."""
        known = self._variables | self._objects.read
        kept = (place for place, value in known.items() if same(comparable(self._now(place)), value))
        return (*self._seen.plain, *self._seen.objects, *kept)

    @property
    def lines(self) -> dict[str, str]:
        """The paths of what was set on modules, and at which line."""
        return {".".join(filter(None, name)): line for name, line in self._seen.set.items()}

    def place_of(self, tensor: torch.Tensor) -> Place | None:
        """Return where a tensor stands beside parameters, buffers and the batch; None for one made by the step."""
        return next((place for place, found in self._tensors() if found is tensor), None)

    def places_of(self, constants: Mapping[str, torch.Tensor]) -> dict[str, Place]:
        """Return where the tensors stand that a graph holds as constants, by the names that the graph has for them."""
        kept = [(place, t) for place, t in self._tensors() if t.numel() and not torch_private.is_fake(t)]
        by_storage = {_memory(tensor): place for place, tensor in kept}  # fake ones are those that the trace sets
        named = {name: by_storage.get(_memory(tensor)) for name, tensor in constants.items()}
        return {name: place for name, place in named.items() if place is not None}

    def warn(self) -> None:
        """Say what the graph will not do."""
        for text, category in self._warnings.items():
            warnings.warn(category(text), stacklevel=2)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """While the loss function runs. What it changes beside the model is afterwards as it was before.

        Raises:
            CaptureError: where the step sets a parameter, or draws random numbers of Python.
        """
        left = self.begins()
        try:
            with self.looked_at():
                yield
            for name, line in self._drawn.items():
                raise CaptureError(f"numbers of {name} are drawn while the model runs{line}: {DRAWN_ONCE}")
            self._left = judged(left.changes(), self._seen, self.origins)
        finally:
            left.put_back()

    def judge(self, again: Callable[[], Again | None]) -> None:
        """Note what is lost of what the step has left in Python.

        Args:
            again: runs further steps.

        Raises:
            CaptureError: where the next step would compute from what this one leaves.
        """
        for text in lost(self._left, again):
            self._note(text)

    @contextmanager
    def looked_at(self) -> Iterator[None]:
        """While the loss function runs, whatever it leaves; the same generators are then as they were."""
        with ExitStack() as stack:
            stack.enter_context(self._attributes_watched())
            stack.enter_context(self._objects.watched())
            stack.enter_context(checkpoints_call(self._checkpoint))
            stack.enter_context(self._random_watched(random, "random", random.getstate, random.setstate))
            stack.enter_context(
                self._random_watched(np.random, "numpy.random", np.random.get_state, np.random.set_state)
            )
            stack.enter_context(replaced(np.random, {"default_rng": self._generator}))
            yield

    @contextmanager
    def _attributes_watched(self) -> Iterator[None]:
        def reading(module: nn.Module, name: str) -> Any:
            watched = name not in OF_TORCH and not name.startswith("__")
            owner = self._owners.get(id(object.__getattribute__(module, "__dict__"))) if watched else None
            try:
                value = object.__getattribute__(module, name)
            except AttributeError:
                if owner is not None:
                    self._seen.misses(module, (owner, name))
                raise
            if owner is not None and not isinstance(safe.of_class(type(module), name), property):
                self._seen.reads((owner, name), value)
            return value

        def writing(module: nn.Module, name: str, value: Any) -> None:
            owner = self._owners.get(id(vars(module)))
            if owner is not None and name not in OF_TORCH:
                self._writes((owner, name), vars(module).get(name, MISSING), value)
            before["__setattr__"](module, name, value)

        with torch_private.patched("attributes", __getattribute__=reading, __setattr__=writing) as before:
            yield

    def _writes(self, name: Name, before: Any, value: Any) -> None:
        if value is not before:
            self._seen.sets(name)
        if plain(value) is not NOT_PLAIN and not same(plain(before), plain(value)):
            self._note(
                f"{Place('attribute', *name)} is set while the model runs{callers_line()}: a captured model runs its "
                "graph, not this line, so the value stays what it was; set it outside the loss function, or keep it in "
                "a buffer"
            )

    def _note(self, text: str, category: type[Warning] = FrozenWarning) -> None:
        self._warnings.setdefault(text, category)

    @contextmanager
    def _checkpoint(self, problem: str) -> Iterator[None]:
        """Around a function that activation checkpointing calls; ``problem`` is what torch says of it."""
        if problem:
            self._note(f"torch.utils.checkpoint: {problem}{callers_line()}", UserWarning)
        if torch.is_grad_enabled() and RecomputationWarning not in self._warnings.values():
            self._note(
                f"activation checkpointing saves no memory in a captured step{callers_line()}: the numbers are the "
                "same, and what would be computed anew in the backward is kept; sw.parallelize(recompute=...) saves it",
                RecomputationWarning,
            )
        before = self._versions()
        yield
        if torch.is_grad_enabled() and self._versions() != before:
            raise CaptureError(
                f"a checkpointed function changes buffers{callers_line()}: torch calls it a second time in the "
                "backward, so that they change twice in a step, and once in a captured one\nLeave "
                "torch.utils.checkpoint out where modules keep statistics, and let sw.parallelize(recompute=...) save "
                "the memory."
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
                self._note_draw(name, callers_line())
                return function(*args, **kwargs)

            return draw

        try:
            with replaced(module, {n: noticing(function) for n, function in functions.items()}):
                yield
        finally:
            if not equal_states(before, state()):
                self._note_draw(name, "")
                set_state(before)

    def _generator(self, seed: Any = None) -> np.random.Generator:
        """`np.random.default_rng`, which without a seed makes one that no other step has."""
        if seed is None:
            self._note_draw("numpy.random", callers_line())
        return _DEFAULT_RNG(seed)

    def _note_draw(self, name: str, line: str) -> None:
        self._drawn.setdefault(name, line)


def _memory(tensor: torch.Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Return which numbers a tensor has."""
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride()
