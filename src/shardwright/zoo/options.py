"""The sections of a configuration file, as types: every key with its type, its range and what it is when left out.

A section that comes in several kinds begins with the key that tells them apart (``data.type``, ``model.name``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from shardwright.zoo.ranges import at_least, between, more_than


@dataclass(frozen=True, kw_only=True)
class System:
    """``distribute``: train together with the other processes that a launcher started; false: alone, in one."""

    distribute: bool = True
    seed: int = at_least(0, 0)
    deterministic: bool = False
    dtype: Literal["float32", "float64"] = "float32"
    backend: str | None = None


@dataclass(frozen=True, kw_only=True)
class ParallelOptions:
    """What `sw.parallelize` takes; ``pins`` maps patterns of module paths to strategies."""

    mode: Literal["single", "data", "semi-auto", "auto"] = "data"
    search: Literal["propagation", "exact"] | None = None
    mesh: str | None = None
    plan: str | None = None
    pins: dict[str, Any] = field(default_factory=dict)
    gradients: Literal["mean", "sum"] = "mean"
    batch_norm: Literal["global", "per-replica"] = "global"
    save_graphs: str | None = None


@dataclass(frozen=True, kw_only=True)
class Batches:
    """How samples come: ``batch_size`` counts the global batch, ``batch_size_per_rank`` one rank's part of it."""

    batch_size: int | None = at_least(1, None)
    batch_size_per_rank: int | None = at_least(1, None)
    workers: int = at_least(0, 0)
    drop_last: bool = False


@dataclass(frozen=True, kw_only=True)
class MnistData(Batches):
    """The files of MNIST, or digits in their form, normalised."""

    type: Literal["mnist"] = "mnist"
    root: str = "data/mnist"


@dataclass(frozen=True, kw_only=True)
class Cifar10Data(Batches):
    """The files of CIFAR-10, or digits in their form, normalised; ``crop`` shifts by up to so many pixels."""

    type: Literal["cifar10"] = "cifar10"
    root: str = "data/cifar10"
    crop: int = at_least(0, 4)
    flip: bool = True


@dataclass(frozen=True, kw_only=True)
class RandomData(Batches):
    """Images of noise with labels drawn from ``classes``: nothing can be learned from them, and no file is read."""

    type: Literal["random"] = "random"
    samples: int = at_least(1, 5000)
    test_samples: int = at_least(1, 1000)
    shape: tuple[int, ...] = at_least(1, (3, 32, 32))
    classes: int = at_least(2, 2)


@dataclass(frozen=True, kw_only=True)
class CharacterData(Batches):
    """A text file, one character after the other; ``path`` null takes the text that comes with Shardwright."""

    type: Literal["characters"] = "characters"
    path: str | None = None
    sequence_length: int = at_least(1, 64)


@dataclass(frozen=True, kw_only=True)
class TableData(Batches):
    """Rows of random numbers and the random numbers to be learned from them."""

    type: Literal["table"] = "table"
    samples: int = at_least(1, 64)
    inputs: int = at_least(1, 32)
    outputs: int = at_least(1, 16)


DataOptions = MnistData | Cifar10Data | RandomData | CharacterData | TableData


@dataclass(frozen=True, kw_only=True)
class Training:
    """``frozen``: patterns of parameter names that are not trained."""

    frozen: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PerceptronModel(Training):
    """Linear layers with ReLUs between; inputs and classes follow from the data."""

    name: Literal["perceptron"] = "perceptron"
    hidden: tuple[int, ...] = at_least(1, (512, 512))
    num_classes: int | None = at_least(1, None)


@dataclass(frozen=True, kw_only=True)
class ResNetModel(Training):
    """``num_classes`` null takes those of the data; stem cifar keeps the sides of images, imagenet quarters them."""

    name: Literal["resnet18", "resnet50"] = "resnet18"
    stem: Literal["cifar", "imagenet"] = "cifar"
    num_classes: int | None = at_least(1, None)
    width: int = at_least(1, 64)
    zero_init: bool = False


@dataclass(frozen=True, kw_only=True)
class GptModel(Training):
    """A decoder of characters; ``vocabulary`` null takes that of the text."""

    name: Literal["gpt"] = "gpt"
    vocabulary: int | None = at_least(1, None)
    width: int = at_least(1, 128)
    heads: int = at_least(1, 4)
    layers: int = at_least(1, 4)
    positions: Literal["learned", "rotary"] = "learned"
    tied: bool = True
    dropout: float = between(0, 1, 0.0)


@dataclass(frozen=True, kw_only=True)
class TwoMatmulsModel(Training):
    """The quick start's two products; inputs and outputs follow from the data."""

    name: Literal["two_matmuls"] = "two_matmuls"


ModelOptions = PerceptronModel | ResNetModel | GptModel | TwoMatmulsModel


@dataclass(frozen=True, kw_only=True)
class CrossEntropy:
    """Of the classes, or of the next character; its metric is the accuracy."""

    name: Literal["cross_entropy"] = "cross_entropy"
    label_smoothing: float = between(0, 1, 0.0)


@dataclass(frozen=True, kw_only=True)
class MeanSquaredError:
    """Of numbers."""

    name: Literal["mse"] = "mse"


LossOptions = CrossEntropy | MeanSquaredError


@dataclass(frozen=True, kw_only=True)
class Rate:
    """``scale_lr`` linear: times the samples of a step, divided by ``base_batch`` (null: one rank's part of a batch).

    ``decay``: which parameters the weight decay acts on; "matrices" spares biases and normalisations.
    """

    lr: float = more_than(0, 0.1)
    weight_decay: float = at_least(0, 0.0)
    decay: Literal["all", "matrices"] = "all"
    scale_lr: Literal["none", "linear"] = "none"
    base_batch: int | None = at_least(1, None)


@dataclass(frozen=True, kw_only=True)
class Sgd(Rate):
    """torch.optim.SGD."""

    name: Literal["sgd"] = "sgd"
    momentum: float = between(0, 1, 0.0)
    nesterov: bool = False


@dataclass(frozen=True, kw_only=True)
class AdamW(Rate):
    """torch.optim.AdamW."""

    name: Literal["adamw"] = "adamw"
    lr: float = more_than(0, 1e-3)
    betas: tuple[float, ...] = between(0, 1, (0.9, 0.999))
    eps: float = more_than(0, 1e-8)


OptimizerOptions = Sgd | AdamW


@dataclass(frozen=True, kw_only=True)
class WarmUp:
    """Steps of the optimizer, or epochs, over which the rate rises from near zero."""

    warmup_steps: int = at_least(0, 0)
    warmup_epochs: float = at_least(0, 0.0)


@dataclass(frozen=True, kw_only=True)
class Constant(WarmUp):
    """The rate throughout."""

    name: Literal["constant"] = "constant"


@dataclass(frozen=True, kw_only=True)
class Cosine(WarmUp):
    """Down to ``floor`` times the rate at the last step."""

    name: Literal["cosine"] = "cosine"
    floor: float = between(0, 1, 0.0)


@dataclass(frozen=True, kw_only=True)
class Steps(WarmUp):
    """Times ``factor`` after every so many epochs."""

    name: Literal["step"] = "step"
    every_epochs: float = more_than(0, 30.0)
    factor: float = between(0, 1, 0.1)


@dataclass(frozen=True, kw_only=True)
class Polynomial(WarmUp):
    """(1 - progress) ** ``power``, down to ``floor`` times the rate."""

    name: Literal["polynomial"] = "polynomial"
    power: float = more_than(0, 1.0)
    floor: float = between(0, 1, 0.0)


SchedulerOptions = Constant | Cosine | Steps | Polynomial


@dataclass(frozen=True, kw_only=True)
class Train:
    """``steps`` ends the run early, counted in optimizer steps, and leaves the schedule that of all epochs.

    A null switches a thing off. Checkpoints are in ``output_dir``/checkpoints: the newest ``checkpoint_latest_k``, and
    the best ``checkpoint_top_k`` by ``checkpoint_metric`` (of the loss less is better, of any other more). ``resume``
    auto goes on from the newest one there or begins anew, a path from that one.
    """

    epochs: int = at_least(1, 10)
    steps: int | None = at_least(1, None)
    accumulate: int = at_least(1, 1)
    clip_norm: float | None = more_than(0, None)
    precision: Literal["float32", "bf16", "fp16"] = "float32"
    ema_decay: float | None = between(0, 1, None)
    log_every: int = at_least(1, 10)
    output_dir: str = "train_output"
    checkpoint: Literal["none", "synchronous", "asynchronous"] = "synchronous"
    checkpoint_every_epochs: int | None = at_least(1, 1)
    checkpoint_every_steps: int | None = at_least(1, None)
    checkpoint_every_minutes: float | None = more_than(0, None)
    checkpoint_latest_k: int | None = at_least(1, 3)
    checkpoint_top_k: int | None = at_least(1, None)
    checkpoint_metric: str = "loss"
    resume: str | None = None
    early_stopping_patience: int | None = at_least(1, None)
    early_stopping_metric: str = "loss"
    nan_guard: bool = True
    progress_bar: bool = True


@dataclass(frozen=True, kw_only=True)
class Eval:
    """The test data after every epoch; ``batch_size`` counts the global batch."""

    enabled: bool = True
    batch_size: int = at_least(1, 500)


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole configuration."""

    data: DataOptions
    model: ModelOptions
    system: System = field(default_factory=System)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    loss: LossOptions = field(default_factory=CrossEntropy)
    optimizer: OptimizerOptions = field(default_factory=Sgd)
    scheduler: SchedulerOptions = field(default_factory=Constant)
    train: Train = field(default_factory=Train)
    eval: Eval = field(default_factory=Eval)
