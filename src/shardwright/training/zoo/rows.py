"""The choices of a configuration: a table per section, and the columns of its rows.

A row says everything that the program must know of one choice, and nothing else in the program asks for its name. The
tables themselves stand in `tables.py`. The options of a choice begin with the key that chooses it (``data.type``,
``model.name``), whose value is the name of the row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from shardwright.data.loading.position import Collate
from shardwright.errors import UsageError

Targets = Literal["classes", "numbers"]
Decay = Literal["all", "matrices"]
LossFunction = Callable[[nn.Module, Any], Any]


@dataclass(frozen=True)
class Range:
    """``holds`` for the numbers within, of which ``text`` says what they are ("at least 1")."""

    text: str
    holds: Callable[[float], bool]


def at_least(least: float, default: Any) -> Any:
    """A field of numbers from ``least`` on, each of them where there are several."""
    return _field(Range(f"at least {least}", lambda number: number >= least), default)


def more_than(bound: float, default: Any) -> Any:
    """A field of numbers above ``bound``."""
    return _field(Range(f"more than {bound}", lambda number: number > bound), default)


def between(least: float, bound: float, default: Any) -> Any:
    """A field of numbers from ``least`` to below ``bound``."""
    return _field(Range(f"from {least} to below {bound}", lambda number: least <= number < bound), default)


def _field(range: Range, default: Any) -> Any:
    return field(default=default, metadata={"range": range})


class ChoiceRow(Protocol):
    """A row of any table."""

    @property
    def options(self) -> type[Any]:
        """The dataclass of the options, whose fields are the keys that this choice has."""


R = TypeVar("R", bound=ChoiceRow)


@dataclass(frozen=True)
class ChoiceTable(Generic[R]):
    """The choices that ``section`` of a configuration has, by name; its ``key`` says which of them is taken."""

    section: str
    rows: Mapping[str, R]
    key: str = "name"

    def row(self, options: Any) -> R:
        """The row that was chosen by ``options``.

        Raises:
            UsageError: where no row has that name; lists those that there are.
        """
        name = getattr(options, self.key)
        if name not in self.rows:
            raise UsageError(f"{self.section}.{self.key}: {name!r} is unknown; choose one of {', '.join(self.rows)}")
        return self.rows[name]

    def options(self, name: str) -> Any:
        """The options of the row ``name``, all as they are when left out."""
        return self.rows[name].options(**{self.key: name})


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """The options that every data set has, which say how samples come.

    ``batch_size`` counts the global batch, ``batch_size_per_rank`` one rank's part of it.
    """

    type: str
    batch_size: int | None = at_least(1, None)
    batch_size_per_rank: int | None = at_least(1, None)
    workers: int = at_least(0, 0)
    drop_last: bool = False


@dataclass(frozen=True)
class Data:
    """The samples to train on and to test on, which are pairs of tensors unless ``collate`` makes others.

    ``classes`` counts what a target can be, and is 0 where targets are numbers. ``collate`` makes a batch of a list of
    samples; None stacks them.
    """

    train: Any
    test: Any
    classes: int
    collate: Collate | None = None

    @property
    def sample_shape(self) -> torch.Size:
        shape: torch.Size = self.train[0][0].shape
        return shape

    @property
    def sample_dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.train[0][0].dtype
        return dtype

    @property
    def target_shape(self) -> torch.Size:
        shape: torch.Size = self.train[0][1].shape
        return shape


@dataclass(frozen=True)
class DataRow:
    """A data set: ``make(options)`` reads or draws it, and ``targets`` says what a loss gets to compare with."""

    options: type[DataOptions]
    make: Callable[[Any], Data]
    targets: Targets


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The options that every model has; ``frozen`` are patterns of parameter names that are not trained."""

    name: str
    frozen: tuple[str, ...] = ()


def no_problems(*_: Any) -> list[str]:
    """Finds nothing wrong: for choices whose options cannot contradict each other."""
    return []


@dataclass(frozen=True)
class ModelRow:
    """A model.

    Attributes:
        make: the model for options and data, its inputs and outputs as many as the data have where options leave it.
        loss: the name of the loss that it is trained with where a configuration names none.
        classes: the key of its options that counts the classes; None where it has none.
        takes_ids: whether its samples are ids; else they are numbers.
        problems: why it cannot take such data under these options, one line each. A model of numbers is not asked
            about ids, nor a model with ``classes`` whether they are as many as those of the data.
    """

    options: type[ModelOptions]
    make: Callable[[Any, Data], nn.Module]
    loss: str
    classes: str | None = None
    takes_ids: bool = False
    problems: Callable[[Any, Data], list[str]] = no_problems


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """The options that every loss has."""

    name: str


@dataclass(frozen=True)
class LossRow:
    """A loss, and with it the metrics: in evaluation a loss function returns them too, in a mapping by their names.

    ``make(options, dtype)`` is ``loss_fn(model, batch)``, which turns floating samples into ``dtype``; ``targets``
    says what it compares with.
    """

    options: type[LossOptions]
    make: Callable[[Any, torch.dtype], LossFunction]
    targets: Targets


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """The options that every optimizer has.

    ``scale_lr`` linear: the rate times the samples of a step, divided by ``base_batch`` (null: one rank's part of a
    batch). ``decay``: which parameters the weight decay acts on; "matrices" spares biases and normalisations.
    """

    name: str
    lr: float = more_than(0, 0.1)
    weight_decay: float = at_least(0, 0.0)
    decay: Decay = "all"
    scale_lr: Literal["none", "linear"] = "none"
    base_batch: int | None = at_least(1, None)


@dataclass(frozen=True)
class OptimizerRow:
    """An optimizer: ``make(options, groups, lr)`` makes it, of groups of parameters with a weight decay each.

    ``problems(options)`` are one line for each thing in which options contradict each other.
    """

    options: type[OptimizerOptions]
    make: Callable[[Any, Iterable[dict[str, Any]], float], Optimizer]
    problems: Callable[[Any], list[str]] = no_problems


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """The options that every schedule has: optimizer steps, or epochs, over which the rate rises from near zero."""

    name: str
    warmup_steps: int = at_least(0, 0)
    warmup_epochs: float = at_least(0, 0.0)


@dataclass(frozen=True)
class RunLength:
    """The length of a run in optimizer steps, ``warmup_steps`` of which begin it."""

    steps: int
    steps_per_epoch: int
    warmup_steps: int


@dataclass(frozen=True)
class ScheduleRow:
    """A schedule: ``make(options, optimizer, length)`` steps the rate of the optimizer over a run of that length."""

    options: type[ScheduleOptions]
    make: Callable[[Any, Optimizer, RunLength], LambdaLR]
