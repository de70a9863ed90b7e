"""Lightning's Trainer loses with our strategy what it loses on one device, and its checkpoints are those of one."""

import importlib.util
import os
import warnings

import pytest

from ranks import run_ranks
from shardwright.errors import ShardwrightError

if all(importlib.util.find_spec(name) is None for name in ("lightning", "pytorch_lightning")):
    pytest.skip("Lightning is not installed: pip install 'shardwright[lightning]'", allow_module_level=True)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def module(step=None):
    """A LightningModule as users write them: dropout, a schedule, and two kinds of logs."""
    import lightning.pytorch as pl
    import torch
    from torch import nn

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
            self.seen = []

        def on_before_batch_transfer(self, batch, dataloader_idx):
            return batch[0].double(), batch[1]

        def training_step(self, batch, batch_idx):
            if step is not None:
                return step(self, batch, batch_idx)
            x, y = batch
            scores = self.net(x)
            self.log("accuracy", (scores.argmax(1) == y).double().mean(), on_step=False, on_epoch=True)
            return nn.functional.cross_entropy(scores, y)

        def validation_step(self, batch, batch_idx):
            x, y = batch
            self.log("val_loss", nn.functional.cross_entropy(self.net(x), y))

        def test_step(self, batch):
            x, y = batch
            wrong = (self.net(x).argmax(1) != y).double()
            self.log_dict({"wrong": wrong.mean(), "most": wrong.sum()}, reduce_fx="max")
            return wrong

        def on_test_batch_end(self, outputs, batch, batch_idx):
            self.seen.append(outputs.sum().item())

        def predict_step(self, batch, batch_idx):
            return self.net(batch[0])

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.seen.append(outputs["loss"].item())

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    torch.manual_seed(0)
    return Module().double()


def data(shuffle, samples=40):
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    x = torch.randn(samples, 16, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, (x[:, :4]).argmax(1)), batch_size=8, shuffle=shuffle)


def as_launched():
    os.environ["TORCHELASTIC_RUN_ID"] = "a test"  # by which Lightning knows that nobody else has started the ranks
    warnings.simplefilter("ignore")  # its advice about loaders and devices


def fitted(folder, strategy):
    """The losses of all steps, what validation, test and prediction gave, and how training goes on elsewhere."""
    import lightning.pytorch as pl
    import torch

    torch.set_num_threads(1)
    as_launched()
    options = {}
    if strategy is not None:
        from shardwright.training.integrations.lightning import ShardwrightStrategy

        options["strategy"] = ShardwrightStrategy(**strategy)
        torch.manual_seed(7 + options["strategy"].global_rank)  # each rank draws other numbers than the others
    if strategy is None or options["strategy"].global_rank == 0:
        torch.manual_seed(7)
    own = module()
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=2, logger=False, enable_progress_bar=False, default_root_dir=folder,
        enable_model_summary=False, gradient_clip_val=1.0, enable_checkpointing=False, accumulate_grad_batches=2,
        **options,
    )  # fmt: skip
    some = data(False, 36)  # whose last batch is smaller
    trainer.fit(own, data(shuffle=True), some)
    trainer.save_checkpoint(f"{folder}/last.ckpt")
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    [validated], [tested] = trainer.validate(own, some, verbose=False), trainer.test(own, some, verbose=False)
    predicted = torch.cat(trainer.predict(own, some)).flatten().tolist()
    again = module()
    further = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=3, logger=False, enable_progress_bar=False, default_root_dir=folder,
        enable_model_summary=False, gradient_clip_val=1.0, enable_checkpointing=False, limit_val_batches=0,
        strategy=ShardwrightStrategy(**strategy) if strategy is not None else "auto",
    )  # fmt: skip
    torch.manual_seed(9)
    further.fit(again, data(shuffle=True), ckpt_path=f"{folder}/last.ckpt")
    return own.seen + again.seen + predicted, metrics | {"validated": validated["val_loss"]} | tested


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {"mode": "data"}),
        pytest.param(4, {"mode": "auto", "mesh": "dp=2,tp=2", "search": "propagation"}, marks=pytest.mark.slow),
    ],
    ids=["data", "4"],
)
def test_the_losses_are_those_of_one_device(tmp_path, ranks, options):
    for name in ("alone", "ranks"):
        (tmp_path / name).mkdir()
    [(expected, logged)] = run_ranks(1, fitted, str(tmp_path / "alone"), None, timeout=180)
    assert len(expected) == 10 + 5 + 5 + 36 * 4
    for losses, metrics in run_ranks(ranks, fitted, str(tmp_path / "ranks"), options, timeout=180):
        assert losses == pytest.approx(expected, rel=0, abs=1e-9)
        assert metrics == pytest.approx(logged, rel=0, abs=1e-9)


def by_index(own, batch, batch_idx):
    return own.net(batch[0]).sum() * (batch_idx % 2)


def by_epoch(own, batch, batch_idx):
    return own.net(batch[0]).sum() * own.current_epoch


def a_number(own, batch, batch_idx):
    own.log("rate", 0.1)
    return own.net(batch[0]).sum()


def appending(own, batch, batch_idx):
    loss = own.net(batch[0]).sum()
    own.seen.append(loss)
    return loss


def refused(folder):
    import lightning.pytorch as pl

    from shardwright.training.integrations.lightning import ShardwrightStrategy

    as_launched()
    found = []
    for step in (by_index, by_epoch, a_number, appending):
        trainer = pl.Trainer(
            accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_progress_bar=False,
            default_root_dir=folder, enable_model_summary=False, enable_checkpointing=False,
            strategy=ShardwrightStrategy(mode="auto"),
        )  # fmt: skip
        try:
            trainer.fit(module(step), data(shuffle=False))
        except ShardwrightError as error:
            found.append(str(error))
    return found


def test_what_a_captured_step_would_get_wrong_is_refused(tmp_path):
    index, epoch, number, appended = run_ranks(1, refused, str(tmp_path), timeout=100)[0]
    assert "training_step asks for batch_idx, which changes from step to step" in index
    assert "training_step asks for trainer, which changes from step to step" in epoch
    assert "training_step logs rate=0.1, which is no tensor" in number
    assert "training_step changes seen, which a captured step would not do again" in appended
