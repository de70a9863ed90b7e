"""transformers' `Trainer` over a model that runs on all ranks.

    from shardwright.training.integrations.huggingface import Trainer

It is made as theirs, loads, logs and schedules as theirs, and saves what ``from_pretrained`` reads.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from shardwright.checkpoint.api import load, save
from shardwright.checkpoint.exchange.exchange import load_state
from shardwright.checkpoint.exchange.pretrained import save_pretrained
from shardwright.checkpoint.whole_run.state import put_random_state, random_state
from shardwright.common.trees import tree_flatten
from shardwright.distributed.agreement import from_all_ranks
from shardwright.distributed.world import init
from shardwright.errors import UsageError
from shardwright.runtime.parallel import parallelize as split
from shardwright.training.integrations.first_batch import first_batch

try:
    import transformers
except ImportError as error:
    raise UsageError("transformers is not installed; type pip install 'transformers[torch]'") from error

# What would change the numbers without this class being asked, and what to do instead.
_REFUSED = {
    "label_smoothing_factor": (0.0, "smooth in the loss function, loss_fn="),
    "neftune_noise_alpha": (None, "leave it out"),
    "torch_compile": (False, "leave it out"),
    "auto_find_batch_size": (False, "leave it out"),
    "deepspeed": (None, "leave it out: sw.parallelize splits what DeepSpeed would"),
    "fsdp": (None, "leave it out: sw.parallelize splits what FSDP would"),
}


_RUN = "run"  # in the folder of a checkpoint: the whole run, in parts that any number of ranks reads


def language_loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """The loss that models of transformers compute where the batch has labels."""
    loss: Tensor = model(**batch).loss
    return loss


class Trainer(transformers.Trainer):  # type: ignore[misc]  # transformers is not read by the type checker
    """The `Trainer` of transformers, with a model that is split over the ranks and loses what it loses on one device.

    Args:
        model, args, ...: as for transformers' own, whose ``per_device_train_batch_size`` is that of a rank.
        loss_fn: ``loss_fn(model, batch) -> loss``, of which batches that are accumulated give the mean; by default that
            of the model, for batches with labels.
        parallelize: more arguments for `sw.parallelize`, as ``{"mode": "data"}``; by default the mode is "auto".

    ``parallel`` is what `sw.parallelize` returned, for so many ``ranks``. Start the ranks by ``shardwright launch``.

    Raises:
        UsageError: for arguments that would give other numbers, or that this class does not serve.
    """

    model: Any

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        *more: Any,
        loss_fn: Any = language_loss,
        parallelize: Mapping[str, Any] | None = None,
        **named: Any,
    ) -> None:
        self.ranks = init().size
        super().__init__(model, args, *more, **named)
        self._refuse_arguments()
        if loss_fn is not language_loss:
            self.model_accepts_loss_kwargs = False  # how many labels a step has is for the model's own loss
        options = {"mode": "auto", "batch": "local", **(parallelize or {})}
        with self.accelerator.autocast():
            self.parallel = split(self.model, loss_fn, self._sample(), **options)
        self.model = self.model_wrapped = self.parallel.module
        self.is_distributed_loading_by_transformers = True  # who made it split reduces its gradients, too

    def _refuse_arguments(self) -> None:
        for name, (usual, instead) in _REFUSED.items():
            if (value := getattr(self.args, name, usual)) != usual:
                raise UsageError(f"TrainingArguments({name}={value!r}) is not served here; {instead}")
        for name in ("compute_loss_func", "compute_metrics", "model_init"):
            if getattr(self, name) is not None:
                raise UsageError(f"Trainer({name}=...) is not served here; pass loss_fn=, or evaluate the saved model")
        if self.ranks > 1 and not self.args.average_tokens_across_devices:
            raise UsageError(
                "TrainingArguments(average_tokens_across_devices=False) is not served here; leave it out: the loss is "
                "the mean over the labels of all ranks"
            )
        if not hasattr(transformers.Trainer, "_sync_replicated_trainable_parameters"):
            raise UsageError(
                f"transformers {transformers.__version__} is too old for this class; type pip install -U transformers"
            )

    def _refuse_uneven(self, what: str, dataset: Any, together: int) -> None:
        """Refuse a last batch with too few samples: accelerate repeats some, so that these count twice."""
        if self.args.dataloader_drop_last or self.ranks == 1:
            return
        size = len(dataset) if hasattr(dataset, "__len__") else None
        if size is None or size % together:
            samples = "has no length, and may" if size is None else f"has {size} samples, which do"
            raise UsageError(
                f"the {what} dataset {samples} not fill batches of {together}, and some samples would be counted "
                "twice; type dataloader_drop_last=True, or take a dataset of such a length"
            )

    def _sample(self) -> Any:
        loader = self.get_train_dataloader()
        loader = getattr(loader, "base_dataloader", loader)
        if self.ranks > 1:
            drawn = _drawn_at_random(loader, self.args.per_device_train_batch_size)
            for name in filter(None, from_all_ranks(drawn)):
                raise UsageError(
                    f"{name} of a batch is drawn at random by the data collator or the dataset, which each rank would "
                    "do for its own part: the losses would not be those of one device\nDraw by the number of the "
                    "sample, in __getitem__ or once for all: dataset.map(function, with_indices=True), with "
                    "generator = torch.Generator().manual_seed(index) in the function; and let the collator only pad "
                    "and stack"
                )
        with first_batch(loader) as batch:
            [batch], labels = self.get_batch_samples(iter([batch]), 1, self.args.device)
            return _with_labels(self._prepare_inputs(batch), labels)  # on the device, as those of steps

    # What transformers asks its subclasses

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The loss of the global batch, of which ``inputs`` are this rank's part."""
        with self.accelerator.autocast():
            found = self.parallel(_with_labels(inputs, num_items_in_batch))
        loss = found[0] if isinstance(found, tuple) else found
        return (loss, {"loss": loss}) if return_outputs else loss

    def train(self, *args: Any, **named: Any) -> Any:
        self.parallel.zero_grad()  # what an abandoned accumulation has kept, too
        return super().train(*args, **named)

    def training_step(self, *args: Any, **named: Any) -> Any:
        """Forward and backward of one batch; gradients are reduced with the last one of a step."""
        with nullcontext() if self.accelerator.sync_gradients else self.parallel.accumulate():
            return super().training_step(*args, **named)

    def predict(self, *_: Any, **__: Any) -> NoReturn:
        raise UsageError(
            "Trainer.predict(...) is not served here: what is captured computes losses; type "
            "trainer.save_model(FOLDER), and predict on one device with the model of from_pretrained(FOLDER)"
        )

    def _get_dataloader(self, dataset: Any, description: str, batch_size: int, *more: Any, **named: Any) -> Any:
        """The loader for training, or of each dataset that is evaluated."""
        self._refuse_uneven(description.lower(), dataset, batch_size * self.ranks)
        if isinstance(dataset, IterableDataset) and self.args.dataloader_drop_last:
            dataset = _WholeBatches(dataset, batch_size * self.ranks)
        return super()._get_dataloader(dataset, description, batch_size, *more, **named)

    def _sync_replicated_trainable_parameters(self, model: Any) -> None:
        """Nothing: the backward leaves the gradients of the global batch."""

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """All ranks write their parts."""
        target = self.args.output_dir if output_dir is None else output_dir
        save_pretrained(self.parallel, target)
        if self.args.should_save:
            for processing in (self.processing_class, getattr(self.data_collator, "tokenizer", None)):
                if processing is not None:
                    processing.save_pretrained(target)
                    break
            torch.save(self.args, os.path.join(target, "training_args.bin"))

    # A run that goes on

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """All ranks write their parts of the run."""
        samples = {"samples": self._samples_of_a_step(), "batch": self._samples_of_a_batch()}
        save(
            os.path.join(output_dir, _RUN), self.parallel, self._own_optimizer(), step=self.state.global_step,
            scheduler=self.lr_scheduler, extra=samples,
        )  # fmt: skip

    def _save_rng_state(self, output_dir: str) -> None:
        """Nothing: they are saved with the run."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Nothing yet: the model is loaded with the optimizer. Raises `UsageError` where that will not do."""
        if not all(from_all_ranks(os.path.isdir(os.path.join(resume_from_checkpoint, _RUN)))):
            raise UsageError(
                f"train(resume_from_checkpoint={str(resume_from_checkpoint)!r}): what was saved has no optimizer, or "
                "another Trainer saved it; begin from it by from_pretrained, and leave out save_only_model=True for "
                "runs that are to go on"
            )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        loaded = load(os.path.join(checkpoint, _RUN), self.parallel, self._own_optimizer(), scheduler=self.lr_scheduler)
        self._random = random_state()
        before, now = loaded.extra["samples"], self._samples_of_a_step()
        batch, batch_now = loaded.extra["batch"], self._samples_of_a_batch()
        # Where the last samples of an epoch are dropped, those that are left depend on the batches.
        differ = before != now or (batch != batch_now and self.args.dataloader_drop_last)
        if differ and not self.args.ignore_data_skip:
            raise UsageError(
                f"{checkpoint} was saved with {before} samples in a step, and {self.ranks} ranks now take {now}, "
                f"in batches of {batch} and of {batch_now}, by which other samples would come next; choose "
                "per_device_train_batch_size and gradient_accumulation_steps so that they are as they were, or begin "
                "anew with ignore_data_skip=True"
            )

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore the random numbers that were saved; loaders have drawn since."""
        if checkpoint is not None:
            put_random_state(self._random)

    def _load_best_model(self) -> None:
        load_state(self.state.best_model_checkpoint, self.parallel)

    def _own_optimizer(self) -> Any:
        return getattr(self.optimizer, "optimizer", self.optimizer)  # accelerate has wrapped it

    def _samples_of_a_step(self) -> int:
        return self._samples_of_a_batch() * int(self.args.gradient_accumulation_steps)

    def _samples_of_a_batch(self) -> int:
        return int(self.args.per_device_train_batch_size) * self.ranks


def _with_labels(batch: Mapping[str, Any], labels: Any) -> dict[str, Any]:
    """A batch for a model that divides its loss by the number of labels, of all batches of a step; if it does."""
    return dict(batch) if labels is None else {**batch, "num_items_in_batch": labels}


def _drawn_at_random(loader: Any, size: int) -> str | None:
    """Return the name of a tensor that differs when its batch is made again, None where none does.

    Each rank draws for its part of a batch, which is not what one device draws for all of it.
    """
    dataset = loader.dataset
    if isinstance(dataset, IterableDataset):
        return None
    random = random_state()
    rows = range(min(len(dataset), size))
    try:
        one, other = (loader.collate_fn([copy.deepcopy(dataset[row]) for row in rows]) for _ in range(2))
    except Exception:  # not all samples can be copied; what is wrong with them is said where they are taken
        return None
    finally:
        put_random_state(random)
    pairs = zip(*(tree_flatten(dict(batch))[0] for batch in (one, other)), strict=False)
    return next((name for (name, a), (_, b) in pairs if isinstance(a, Tensor) and not torch.equal(a, b)), None)


class _WholeBatches(IterableDataset[Any]):
    """An iterable dataset without the samples that do not fill a last batch, which transformers would not drop."""

    def __init__(self, dataset: Any, size: int) -> None:
        self.dataset, self._size = dataset, size
        for name in ("generator", "set_epoch"):  # by which accelerate has all ranks draw alike
            if hasattr(dataset, name):
                setattr(self, name, getattr(dataset, name))

    def __len__(self) -> int:
        return len(self.dataset) // self._size * self._size

    def __iter__(self) -> Iterator[Any]:
        batch = []
        for sample in self.dataset:
            batch.append(sample)
            if len(batch) == self._size:
                yield from batch
                batch = []
