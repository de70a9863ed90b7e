"""A strategy for Lightning's `Trainer`: what a LightningModule computes of a batch runs on all ranks as on one device.

    Trainer(strategy=ShardwrightStrategy(mode="auto"), devices=1)

``training_step`` is captured once as the loss function, and what it logs comes out of the graph beside the loss. Every
rank reads the whole of each batch, which is the global one, and computes its part of it. The steps for validation, test
and prediction are captured where parameters are split; where none is, each rank runs them as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright.common.trees import tree_leaves, tree_map
from shardwright.compiler.mesh.split_tensor import laid_out
from shardwright.distributed.agreement import from_all_ranks
from shardwright.distributed.world import init
from shardwright.errors import CaptureError, UsageError
from shardwright.runtime.model import ParallelModel
from shardwright.runtime.parallel import parallelize
from shardwright.training.integrations.first_batch import first_batch

try:
    from lightning.pytorch.strategies import Strategy
    from lightning.pytorch.trainer.states import TrainerFn
except ImportError:
    try:
        from pytorch_lightning.strategies import Strategy
        from pytorch_lightning.trainer.states import TrainerFn
    except ImportError as error:
        raise UsageError("Lightning is not installed; type pip install 'shardwright[lightning]'") from error

_OURS = ("batch", "predict_fn")
_INSTEAD = (
    "{0} is captured because parameters are split over the ranks: leave it out (limit_val_batches=0) and try the saved "
    "checkpoint on one device, or type mode='data', which splits none and runs it as it is"
)


class ShardwrightStrategy(Strategy):  # type: ignore[misc]  # Lightning is not read by the type checker
    """Splits the module of a `Trainer` over the ranks, with the losses of one device.

    The loaders give global batches, as on one device: leave ``devices`` at 1, and start the ranks by
    ``shardwright launch``. The parameters that ``configure_optimizers`` sees are those of this rank.

    Args:
        mode: as in `sw.parallelize`, and so are all other options.

    Raises:
        UsageError: where Lightning is not installed, or for options that this strategy sets itself.
    """

    strategy_name = "shardwright"
    model: Any

    def __init__(self, mode: str = "auto", **options: Any) -> None:
        if mine := [name for name in _OURS if name in options]:
            raise UsageError(f"ShardwrightStrategy({mine[0]}=...) is its own business; leave it out")
        super().__init__()
        self._world = init()
        self._options = {"mode": mode, **options}
        self._noted = _Noted()
        self.parallel: ParallelModel | None = None
        self.global_rank, self.local_rank = self._world.rank, self._world.local_rank
        self.node_rank, self.world_size = 0, self._world.size

    # The model

    def setup(self, trainer: Any) -> None:
        """Capture the training step on the first batch, plan it, and make the optimizers over what came of it."""
        self.accelerator.setup(trainer)
        self._draw_alike()
        if trainer.state.fn == TrainerFn.FITTING:
            self.model = self.precision_plugin.convert_module(self.model)
            self._parallelize(trainer)
            self.setup_optimizers(trainer)
        elif self.parallel is None:
            self.lightning_module.to(self.root_device)
        self.setup_precision_plugin()

    def _draw_alike(self) -> None:
        """All ranks shuffle, and draw what else loaders draw, as rank 0 does."""
        states = from_all_ranks(torch.get_rng_state())
        torch.set_rng_state(states[0])

    def _parallelize(self, trainer: Any) -> None:
        module = self.lightning_module
        if not module.automatic_optimization:
            raise UsageError(
                f"{type(module).__name__} steps its optimizers itself (automatic_optimization=False), which this "
                "strategy does not serve; leave the steps to the Trainer, or type sw.parallelize in a loop of your own"
            )
        if self.parallel is not None:
            self.parallel.close()
        with self.precision_plugin.train_step_context():
            self.parallel = parallelize(
                module,
                self._loss_of,
                self._sample(trainer),
                batch="global",
                predict_fn=self._outputs_of,
                **self._options,
            )

    def _sample(self, trainer: Any) -> Any:
        trainer.fit_loop.setup_data()
        loader = trainer.train_dataloader
        if isinstance(loader, Mapping | list | tuple):
            raise UsageError("train_dataloader() gives several loaders; give one whose batches have all that is needed")
        with first_batch(loader) as batch:  # what a loop of Lightning does with it
            batch = self.precision_plugin.convert_input(batch)
            return self.batch_to_device(self.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0))

    def _loss_of(self, module: Any, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss function that is captured: the training step, with what it logs."""
        result, logged = self._ran(module, "training_step", batch)
        loss = result["loss"] if isinstance(result, Mapping) else result
        if not isinstance(loss, Tensor):
            raise CaptureError(f"training_step returned {loss!r} for a loss; expected a tensor, or a dict with 'loss'")
        return loss, logged

    def _outputs_of(self, module: Any, asked: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Tensor]]:
        """Return what another step returns, in a tuple that is empty for None, and what it logs."""
        result, logged = self._ran(module, asked["step"], asked["batch"], *asked["more"])
        return () if result is None else (result,), logged

    def _ran(self, module: Any, step: str, batch: Any, *more: Any) -> tuple[Any, dict[str, Tensor]]:
        """Return what a step of the module returns and logs; ``more`` is what it takes behind the batch's number."""
        logged: dict[str, Tensor] = {}

        def log(name: str, value: Any, **how: Any) -> None:
            if not isinstance(value, Tensor):
                raise CaptureError(
                    f"{step} logs {name}={value!r}, which is no tensor: a captured step would log this number for "
                    "ever; log it in a hook, as on_train_batch_end, or as a tensor that is computed from the batch"
                )
            logged[name] = value.detach()
            self._noted.note(step, name, how)

        method = getattr(module, step)
        index = [_Unknown(step, "batch_idx")] if len(inspect.signature(method).parameters) > 1 else []
        before = _attributes(module)
        with _in_place_of(module, "log", log), _in_place_of(module, "_trainer", _Unknown(step, "trainer")):
            result = method(batch, *index, *more)
        _refuse_changes(step, before, _attributes(module))
        return result, logged

    def _log(self, step: str, logged: Mapping[str, Tensor]) -> None:
        for name, how in self._noted.of(step, logged).items():
            self.lightning_module.log(name, logged[name], **how)

    def training_step(self, *args: Any, **named: Any) -> Any:
        assert self.parallel is not None
        batch = named["batch"] if "batch" in named else args[0]
        with self.precision_plugin.train_step_context():
            loss, logged = self.parallel(batch)
        self._log("training_step", logged)
        return loss

    def validation_step(self, *args: Any, **named: Any) -> Any:
        return self._other_step("validation_step", self.precision_plugin.val_step_context(), args, named)

    def test_step(self, *args: Any, **named: Any) -> Any:
        return self._other_step("test_step", self.precision_plugin.test_step_context(), args, named)

    def predict_step(self, *args: Any, **named: Any) -> Any:
        return self._other_step("predict_step", self.precision_plugin.predict_step_context(), args, named)

    def _other_step(self, step: str, context: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """A step other than that of the training: as it is where every rank has the whole module."""
        if not self._is_split():
            return getattr(super(), step)(*args, **named)
        with context:
            return self._outputs(step, *args, *named.values())

    def _is_split(self) -> bool:
        return self.parallel is not None and any(isinstance(p, DTensor) for p in self.lightning_module.parameters())

    def _outputs(self, step: str, batch: Any, index: Any = None, *more: Any) -> Any:
        """Return what a captured step returns, whole on every rank."""
        assert self.parallel is not None
        # A program that is made here serves the training, too, where tensors of the inference mode are refused.
        with torch.inference_mode(False):
            asked = {"step": step, "batch": tree_map(_ordinary, batch), "more": list(more)}
            try:
                result, logged = self.parallel.predict(asked)
            except CaptureError as error:
                raise CaptureError(f"{error}\n{_INSTEAD.format(step)}") from error
        self._log(step, logged)
        return result[0] if result else None

    # Checkpoints have whole tensors, as those of one device

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self.parallel is None:
            return dict(super().lightning_module_state_dict())
        return dict(self.parallel.full_state_dict())

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self.parallel is None:
            super().load_model_state_dict(checkpoint, strict)
        else:
            self.parallel.load_state_dict(checkpoint["state_dict"], strict=strict)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        state = optimizer.state_dict()
        whole = {key: {name: _whole(value) for name, value in kept.items()} for key, kept in state["state"].items()}
        return {**state, "state": whole}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            kept = {
                key: {name: _split_as(value, parameters[key]) for name, value in values.items()}
                for key, values in saved["state"].items()
            }
            optimizer.load_state_dict({**saved, "state": kept})

    def teardown(self) -> None:
        """The module stays where it is."""
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # The ranks

    @property
    def root_device(self) -> torch.device:
        return self._world.device

    @property
    def is_global_zero(self) -> bool:
        return self._world.rank == 0

    def model_to_device(self) -> None:
        """Nothing: `parallelize` brings it there, tensor by tensor."""

    def reduce(self, tensor: Any, *_: Any, **__: Any) -> Any:
        """Return the tensor as it is: what is logged is of the global batch already."""
        return tensor

    def barrier(self, name: str | None = None) -> None:
        dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return from_all_ranks(obj)[src]

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        return torch.stack([theirs.to(tensor.device) for theirs in from_all_ranks(tensor.detach().cpu())])


class _Noted:
    """The way in which values are logged, by step and name, as the rank that captures a step finds out."""

    def __init__(self) -> None:
        self._mine: dict[tuple[str, str], dict[str, Any]] = {}
        self._everyones: dict[tuple[str, str], dict[str, Any]] = {}

    def note(self, step: str, name: str, how: dict[str, Any]) -> None:
        """Record the values that the module logged while it was captured, on this rank or another one."""
        self._mine[step, name] = how

    def of(self, step: str, names: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Return how a step logs each name; every rank asks for the same."""
        wanted = {name: (step, name) for name in names}
        if any(key not in self._everyones for key in wanted.values()):
            self._everyones = from_all_ranks(self._mine)[0]  # it is rank 0 that captures
        return {name: self._everyones[key] for name, key in wanted.items()}


class _Unknown:
    """Something that differs from step to step, and that a captured step would keep as it was when it was captured."""

    def __init__(self, step: str, name: str) -> None:
        object.__setattr__(self, "_step", step)
        object.__setattr__(self, "_name", name)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise CaptureError(
            f"{self._step} asks for {self._name}, which changes from step to step: it is captured once, and would go "
            "on with the first answer; do in a hook what depends on it (on_train_batch_start, on_validation_batch_end)"
        )

    def __getattr__(self, name: str) -> Any:
        self._refuse()

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __bool__ = __int__ = __index__ = __float__ = __hash__ = __str__ = __format__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __floordiv__ = __truediv__ = _refuse


@contextmanager
def _in_place_of(module: Any, name: str, value: Any) -> Iterator[None]:
    """The module with another attribute ``name``, which is no parameter."""
    there, before = name in vars(module), vars(module).get(name)
    vars(module)[name] = value
    try:
        yield
    finally:
        if there:
            vars(module)[name] = before
        else:
            del vars(module)[name]


def _attributes(module: Any) -> dict[str, tuple[Any, int]]:
    """The attributes of a module and of those in it, but for buffers: each value, and how much is in it."""
    return {
        f"{path}.{name}".lstrip("."): (value, len(tree_leaves(value)))
        for path, inner in module.named_modules()
        for name, value in vars(inner).items()
    }


def _refuse_changes(step: str, before: Mapping[str, tuple[Any, int]], after: Mapping[str, tuple[Any, int]]) -> None:
    """Refuse what would be lost in silence; of attributes that are set in training the capture itself warns."""
    for name, (value, size) in after.items():
        old, old_size = before.get(name, (None, size))
        if size != old_size or (step != "training_step" and value is not old):
            raise CaptureError(
                f"{step} changes {name}, which a captured step would not do again; log what is to be counted as a "
                "tensor, or return it, and count it in a hook (on_train_batch_end, on_validation_batch_end)"
            )


def _ordinary(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) and value.is_inference() else value


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _split_as(value: Any, parameter: Tensor) -> Any:
    """A whole tensor of an optimizer's state, as its parameter is split."""
    if not isinstance(parameter, DTensor) or not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    return laid_out(value, parameter)
