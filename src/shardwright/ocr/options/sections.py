"""The sections of a configuration of text detection or recognition: the keys that users know, with types and ranges."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from shardwright.distributed.precision import Precision
from shardwright.errors import UsageError
from shardwright.ocr.options.parts import BACKBONES, HEADS, LOSSES, METRICS, NECKS, POSTPROCESSES
from shardwright.ocr.samples.sample import Task
from shardwright.training.zoo.rows import at_least, between, more_than


@dataclass(frozen=True, kw_only=True)
class TextSystem:
    """The processes of a run.

    ``mode`` 0 and 1 split the batch, as "data" does, and "auto" decides what is split. ``amp_level`` O0 computes in
    float32, the others by autocast in float16, with a scaler, or in ``amp_dtype``; ``amp_level_infer`` says the same of
    weights that are evaluated or asked after training. With ``drop_overflow_update`` a step is left out whose float16
    gradients overflow; without it such a step is made, too, and the run ends where the loss is no longer finite.
    Validations come after every ``val_interval`` epochs from ``val_start_epoch`` on. ``distribute`` takes the ranks
    that a launcher has started.
    """

    mode: Literal[0, 1, "data", "auto", "semi-auto", "single"] = 0
    distribute: bool = True
    amp_level: Literal["O0", "O1", "O2", "O3"] = "O0"
    amp_level_infer: Literal["O0", "O1", "O2", "O3"] = "O0"
    amp_dtype: Literal["fp16", "bf16"] = "fp16"
    dtype: Literal["float32", "float64"] = "float32"
    seed: int = at_least(0, 42)
    log_interval: int = at_least(1, 100)
    val_while_train: bool = True
    val_start_epoch: int = at_least(1, 1)
    val_interval: int = at_least(1, 1)
    drop_overflow_update: bool = True
    ckpt_save_policy: Literal["top_k", "latest_k"] = "top_k"
    ckpt_max_keep: int = at_least(1, 5)
    backend: str | None = None


@dataclass(frozen=True, kw_only=True)
class Model:
    """The options of the model.

    ``pretrained`` is a checkpoint, or the address of one of torch's files, whose weights are the first ones. ``resume``
    goes on from the newest checkpoint of the run (true), or from the one at a path.
    """

    type: Task
    transform: str | None = None
    backbone: Any = field(metadata={"table": BACKBONES})
    neck: Any = field(metadata={"table": NECKS})
    head: Any = field(metadata={"table": HEADS})
    pretrained: str | None = None
    resume: bool | str = False


@dataclass(frozen=True, kw_only=True)
class Scheduler:
    """The rate in optimizer steps: it rises over ``warmup_epochs``, and falls to ``min_lr`` over the other epochs.

    Cosines fall over ``decay_epochs`` where these are given, and stay at ``min_lr`` after that. ``decay_rate`` is the
    power of polynomial_decay, and the factor of step_decay after every ``decay_epochs`` (10 where none are given).
    """

    scheduler: Literal[
        "constant", "warmup_cosine_decay", "cosine_decay", "polynomial_decay", "step_decay"
    ] = "constant"  # fmt: skip
    lr: float = more_than(0, 0.01)
    min_lr: float = at_least(0, 0.0)
    num_epochs: int = at_least(1, 200)
    warmup_epochs: float = at_least(0, 0.0)
    decay_epochs: float | None = more_than(0, None)
    decay_rate: float = more_than(0, 0.9)


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """An optimizer of `ocr.optimizers`, and which parameters are spared the weight decay.

    Those are the ones in whose names one of ``no_weight_decay_params`` stands, as MindSpore has them: gamma and beta of
    normalisations, bias. Where there are none, ``filter_bias_and_bn`` names these three, and so does
    ``grouping_strategy``, which comes before both. ``beta1`` and ``beta2`` are those of adam, adamw and lion.
    """

    opt: Literal[
        "sgd", "SGD", "momentum", "nesterov", "adam", "Adam", "adamw", "AdamW", "lion", "Lion"
    ] = "adamw"  # fmt: skip
    filter_bias_and_bn: bool = True
    no_weight_decay_params: tuple[str, ...] = ()
    grouping_strategy: Literal["filter_norm_and_bias"] | None = None
    momentum: float = between(0, 1, 0.9)
    weight_decay: float = at_least(0, 0.0)
    nesterov: bool = False
    beta1: float | None = between(0, 1, None)
    beta2: float | None = between(0, 1, None)


@dataclass(frozen=True, kw_only=True)
class LossScaler:
    """Loss scaling of float16 is dynamic and begins at ``loss_scale``."""

    type: Literal["static", "dynamic"] = "dynamic"
    loss_scale: float = more_than(0, 65536.0)
    scale_factor: float = more_than(1, 2.0)
    scale_window: int = at_least(1, 1000)


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """The source of samples: one path below ``dataset_root``, or a list of them.

    ``data_dir`` has the images, or the databases of LMDBDataset. ``label_file`` is a file of lines with JSON
    (detection) or of words (recognition), the folder of ICDAR's files, or the ``.mat`` of SynthTextDataset.
    ``sample_ratio`` is the share that is taken, of all or of each. With ``filter_max_len`` words of more than
    ``max_text_len`` characters are left out, in an evaluation, too. At most ``max_failed_samples`` samples may fail on
    a rank; in evaluation none may.
    """

    type: Literal["DetDataset", "SynthTextDataset", "RecDataset", "LMDBDataset"]
    dataset_root: str = ""
    data_dir: str | tuple[str, ...] = ""
    label_file: str | tuple[str, ...] | None = None
    sample_ratio: float | tuple[float, ...] = 1.0
    shuffle: bool | None = None
    transform_pipeline: tuple[Any, ...] = ()
    output_columns: tuple[str, ...] | None = None
    net_input_column_index: tuple[int, ...] | None = None
    label_column_index: tuple[int, ...] | None = None
    use_minddata: bool = False
    filter_max_len: bool = False
    max_text_len: int | None = at_least(1, None)
    max_failed_samples: int = at_least(0, 10)


@dataclass(frozen=True, kw_only=True)
class Loading:
    """``batch_size`` counts the samples of one rank, ``global_batch_size`` in its place those of all ranks together."""

    shuffle: bool | None = None
    batch_size: int | None = at_least(1, None)
    global_batch_size: int | None = at_least(1, None)
    drop_remainder: bool = False
    num_workers: int = at_least(0, 0)
    max_rowsize: int | None = at_least(1, None)


@dataclass(frozen=True, kw_only=True)
class TextTrain:
    """The course of a run; its checkpoints, curve and table of results are in ``ckpt_save_dir``.

    ``steps`` ends it early, counted in optimizer steps. Checkpoints are written after every epoch, and after every
    ``ckpt_every_steps``.
    """

    ckpt_save_dir: str = "./tmp"
    ckpt_every_steps: int | None = at_least(1, None)
    gradient_accumulation_steps: int = at_least(1, 1)
    clip_grad: bool = False
    clip_norm: float = more_than(0, 1.0)
    ema: bool = False
    ema_decay: float = between(0, 1, 0.9999)
    steps: int | None = at_least(1, None)
    pred_cast_fp32: bool = True
    dataset_sink_mode: bool = False
    dataset: Dataset
    loader: Loading


@dataclass(frozen=True, kw_only=True)
class Evaluating:
    """The evaluation of a run or by ``tools/eval.py``, which takes the checkpoint ``ckpt_load_path``."""

    ckpt_load_path: str | None = None
    dataset_sink_mode: bool = False
    dataset: Dataset
    loader: Loading


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A whole configuration. ``common`` and ``predict`` are free: the first is for YAML's anchors.

    ``eval`` may be missing where nothing is validated.
    """

    system: TextSystem = field(default_factory=TextSystem)
    common: dict[str, Any] = field(default_factory=dict)
    model: Model
    postprocess: Any = field(metadata={"table": POSTPROCESSES})
    metric: Any = field(metadata={"table": METRICS})
    loss: Any = field(metadata={"table": LOSSES})
    scheduler: Scheduler = field(default_factory=Scheduler)
    optimizer: Optimizer = field(default_factory=Optimizer)
    loss_scaler: LossScaler = field(default_factory=LossScaler)
    train: TextTrain
    eval: Evaluating | None = None
    predict: dict[str, Any] = field(default_factory=dict)

    @property
    def precision(self) -> Precision:
        """Return what forwards compute in while the network is trained."""
        return "float32" if self.system.amp_level == "O0" else self.system.amp_dtype

    @property
    def inference_precision(self) -> Precision:
        """Return what forwards compute in when the network has been trained."""
        return "float32" if self.system.amp_level_infer == "O0" else self.system.amp_dtype

    @property
    def evaluating(self) -> Evaluating:
        """Return the section ``eval``.

        Raises:
            UsageError: where there is none.
        """
        if self.eval is None:
            raise UsageError("the section eval is missing: it says on which images and how networks are evaluated")
        return self.eval
