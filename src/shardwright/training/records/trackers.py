"""Records in the trackers that people have: TensorBoard, Weights & Biases, MLflow; imported when they are asked for."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from shardwright.training.records.record import Record, Target


class TensorBoard:
    """Event files that ``tensorboard --logdir`` shows; what an earlier process recorded too much is not shown."""

    def __init__(self, target: Target) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(target.folder / "tensorboard", purge_step=target.steps + 1)

    def write(self, record: Record) -> None:
        for name, value in {**record.values, "epoch": record.epoch}.items():
            self._writer.add_scalar(name, value, record.steps)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of W&B; its own variables (``WANDB_PROJECT``, ``WANDB_MODE``, ``WANDB_RUN_ID``) say where and which."""

    def __init__(self, target: Target) -> None:
        wandb: Any = import_module("wandb")
        self._run = wandb.init(dir=target.folder, config=dict(target.config), resume="allow")

    def write(self, record: Record) -> None:
        self._run.log({**record.values, "epoch": record.epoch}, step=record.steps)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run of MLflow; its own variables (``MLFLOW_TRACKING_URI``, ``MLFLOW_RUN_ID``) say where and which."""

    def __init__(self, target: Target) -> None:
        self._mlflow: Any = import_module("mlflow")
        self._run = self._mlflow.start_run()
        self._mlflow.log_params(dict(target.config))

    def write(self, record: Record) -> None:
        values = {**record.values, "epoch": float(record.epoch)}
        self._mlflow.log_metrics(values, step=record.steps, run_id=self._run.info.run_id)

    def close(self) -> None:
        self._mlflow.end_run()
