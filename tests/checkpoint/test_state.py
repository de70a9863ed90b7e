"""What a checkpoint keeps of models, optimizers and generators, and that all of it comes back, in one process."""

import random
import warnings

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.optim import swa_utils

import shardwright as sw
from models import NETWORKS, Perceptron, Transformer, next_token, transformer_batch
from shardwright.checkpoint.loading.source import open_source
from shardwright.errors import CheckpointError, UsageError

OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.9, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "SGD with a tensor as its rate": lambda p: torch.optim.SGD(p, lr=torch.tensor(1e-2), momentum=0.9),
}


def perceptron(make=OPTIMIZERS["AdamW"], seed=0):
    torch.manual_seed(seed)
    model = Perceptron()
    return model, make(model.parameters())


def train(model, optimizer, steps, first=0):
    _, loss_fn, batch_of = NETWORKS["perceptron"]
    losses = []
    for step in range(first, first + steps):
        loss, _ = loss_fn(model, batch_of(8, step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def same(a, b):
    """Whether two optimizers' states are bit-identical, the types of their values included."""
    left, right = a.state_dict(), b.state_dict()
    assert left["param_groups"] == right["param_groups"]
    assert left["state"].keys() == right["state"].keys()
    for index, state in left["state"].items():
        assert state.keys() == right["state"][index].keys()
        for key, value in state.items():
            other = right["state"][index][key]
            assert type(value) is type(other)
            assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other
            assert not isinstance(value, torch.Tensor) or value.dtype == other.dtype


@pytest.mark.parametrize(("name", "before"), [*((name, 3) for name in OPTIMIZERS), ("AdamW", 0)])
def test_every_optimizer_of_torch_goes_on_as_if_nothing_had_been(name, before, tmp_path):
    model, optimizer = perceptron(OPTIMIZERS[name])
    train(model, optimizer, before)
    assert sw.checkpoint.save(tmp_path, model, optimizer, step=before) == f"step-{before:08d}"
    fresh, its = perceptron(OPTIMIZERS[name], seed=1)
    train(fresh, its, 1)  # a state that must go
    loaded = sw.checkpoint.load(tmp_path, fresh, its)
    assert (loaded.name, loaded.step, loaded.extra) == (f"step-{before:08d}", before, None)
    same(optimizer, its)
    assert train(fresh, its, 3, before) == train(model, optimizer, 3, before)
    same(optimizer, its)


def test_a_state_that_has_another_dtype_than_its_parameter_keeps_it(tmp_path):
    model, optimizer = perceptron()
    train(model, optimizer, 1)
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].double() / 3
    sw.checkpoint.save(tmp_path, model, optimizer, step=1)
    fresh, its = perceptron(seed=1)
    sw.checkpoint.load(tmp_path, fresh, its)
    same(optimizer, its)
    assert next(iter(its.state.values()))["exp_avg"].dtype == torch.float64


def test_lbfgs_is_refused_once_it_has_a_state(tmp_path):
    model = Perceptron()
    optimizer = torch.optim.LBFGS(model.parameters())
    x, y = NETWORKS["perceptron"][2](8)

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    optimizer.step(closure)
    with pytest.raises(CheckpointError, match=r"LBFGS keeps a list as '\w+', over all parameters at once.*torch\.save"):
        sw.checkpoint.save(tmp_path, model, optimizer, step=1)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("step")]


def test_state_is_kept_by_name_whatever_the_order_of_the_parameters(tmp_path):
    model, _ = perceptron()
    optimizer = torch.optim.AdamW([{"params": model.layers[4].parameters()}, {"params": model.layers[:4].parameters()}])
    train(model, optimizer, 2)
    sw.checkpoint.save(tmp_path, model, optimizer, step=2)
    fresh, _ = perceptron(seed=1)
    reversed_ = [
        {"params": list(fresh.layers[:4].parameters())[::-1], "lr": 9.0},
        {"params": [fresh.layers[4].bias, fresh.layers[4].weight]},
    ]
    its = torch.optim.AdamW(reversed_)
    sw.checkpoint.load(tmp_path, fresh, its)
    for (name, parameter), other in zip(model.named_parameters(), fresh.parameters(), strict=True):
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(optimizer.state[parameter][key], its.state[other][key]), name
    assert its.param_groups[0]["lr"] == 1e-3


def test_frozen_parameters_have_no_state_and_options_of_the_groups_come_back(tmp_path):
    def made(seed):
        model, _ = perceptron(seed=seed)
        model.layers[0].weight.requires_grad_(False)
        groups = [
            {"params": model.layers[:3].parameters(), "lr": 0.5, "weight_decay": 0.25},
            {"params": model.layers[4].parameters()},
        ]
        return model, torch.optim.SGD(groups, lr=0.1, momentum=0.5, foreach=seed == 1)

    model, optimizer = made(0)
    train(model, optimizer, 2)
    optimizer.param_groups[1]["lr"] = 0.125
    sw.checkpoint.save(tmp_path, model, optimizer, step=2)
    fresh, its = made(1)
    sw.checkpoint.load(tmp_path, fresh, its)
    assert [group["lr"] for group in its.param_groups] == [0.5, 0.125]
    assert its.param_groups[0]["weight_decay"] == 0.25
    assert its.param_groups[0]["foreach"] is True, "how a step is computed is this run's own"
    assert fresh.layers[0].weight not in its.state
    entries = open_source(tmp_path).manifest.entries
    assert "optimizer.state.layers.0.bias.momentum_buffer" in entries
    assert "optimizer.state.layers.0.weight.momentum_buffer" not in entries


def test_tied_weights_are_stored_once_under_all_their_names(tmp_path):
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters())
    next_token(model, transformer_batch(4)).backward()
    optimizer.step()
    sw.checkpoint.save(tmp_path, model, optimizer, step=1)
    manifest = open_source(tmp_path).manifest
    tied = [manifest.entries[f"model.{name}"].chunks for name in ("tokens.weight", "head.weight")]
    assert tied[0] == tied[1]
    by_torch = {"model": Transformer().state_dict()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        dcp.load(by_torch, checkpoint_id=tmp_path / "step-00000001")
    assert all(torch.equal(by_torch["model"][name], tensor) for name, tensor in model.state_dict().items())
    fresh = Transformer()
    its = torch.optim.AdamW(fresh.parameters())
    sw.checkpoint.load(tmp_path, fresh, its)
    same(optimizer, its)
    assert torch.equal(fresh.head.weight, model.head.weight)
    apart = Transformer()
    apart.head.weight = nn.Parameter(torch.zeros_like(apart.tokens.weight))
    sw.checkpoint.load(tmp_path, apart)
    assert torch.equal(apart.head.weight, model.head.weight)
    assert torch.equal(apart.tokens.weight, model.head.weight)
    with torch.no_grad():
        apart.head.weight += 1
    sw.checkpoint.save(tmp_path, apart, step=2)
    with pytest.raises(CheckpointError, match=r"model\.tokens\.weight and model\.head\.weight are one tensor here"):
        sw.checkpoint.load(tmp_path, fresh)


def test_what_is_not_passed_is_not_loaded_and_what_was_not_saved_is_missed(tmp_path):
    model, optimizer = perceptron()
    sw.checkpoint.save(tmp_path, model, step=4, epoch=2, metrics={"loss": 0.5}, extra={"best": [1, 2.5, "x", None]})
    with pytest.raises(CheckpointError, match="has no optimizer: it was saved without one; load it without optimizer="):
        sw.checkpoint.load(tmp_path, model, optimizer)
    with pytest.raises(CheckpointError, match=r"has no scheduler.*leave out scheduler="):
        sw.checkpoint.load(tmp_path, model, scheduler=sw.constant_schedule(optimizer))
    loaded = sw.checkpoint.load(tmp_path / "step-00000004", perceptron(seed=1)[0])
    assert (loaded.step, loaded.epoch, dict(loaded.metrics)) == (4, 2, {"loss": 0.5})
    assert loaded.extra == {"best": [1, 2.5, "x", None]}


def test_schedules_scalers_averages_and_extra_state_come_back(tmp_path):
    class Counting(Perceptron):
        calls = 0

        def get_extra_state(self):
            return {"calls": self.calls}

        def set_extra_state(self, state):
            self.calls = state["calls"]

    def made(seed):
        torch.manual_seed(seed)
        model = Counting()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        averaged = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
        first, second = sw.constant_schedule(optimizer, warmup_steps=2), sw.cosine_schedule(optimizer, steps=10)
        schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [first, second], milestones=[2])
        return model, optimizer, averaged, schedule, torch.amp.GradScaler("cpu", init_scale=64.0)

    model, optimizer, averaged, schedule, scaler = made(0)
    model.calls = 7
    for _ in range(4):
        train(model, optimizer, 1)
        schedule.step()
        averaged.update_parameters(model)
    scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0, "_growth_tracker": 3})
    sw.checkpoint.save(tmp_path, model, optimizer, scheduler=schedule, scaler=scaler, ema=averaged, step=4)
    fresh, its, average, plan, scale = made(1)
    sw.checkpoint.load(tmp_path, fresh, its, scheduler=plan, scaler=scale, ema=average)
    assert fresh.calls == 7
    assert plan.get_last_lr() == schedule.get_last_lr()
    assert scale.state_dict() == scaler.state_dict()
    assert average.n_averaged == 4
    for mine, other in zip(averaged.parameters(), average.parameters(), strict=True):
        assert torch.equal(mine, other)
    schedule.step()
    plan.step()
    assert its.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_the_generators_go_on_where_they_were(tmp_path):
    sw.set_seed(5)
    torch.rand(3), random.random(), np.random.rand(2)
    sw.checkpoint.save(tmp_path, nn.Linear(2, 2), step=1)
    expected = torch.rand(3), random.random(), np.random.rand(2)
    sw.set_seed(6)
    sw.checkpoint.load(tmp_path, nn.Linear(2, 2))
    assert torch.equal(torch.rand(3), expected[0])
    assert random.random() == expected[1]
    assert np.array_equal(np.random.rand(2), expected[2])


def groups_by_dims(model):
    matrices = [p for p in model.parameters() if p.ndim > 1]
    return torch.optim.AdamW([{"params": matrices}, {"params": [p for p in model.parameters() if p.ndim < 2]}])


@pytest.mark.parametrize(
    ("optimizer_of", "message"),
    [
        (
            lambda model: torch.optim.SGD(model.parameters()),
            "the checkpoint has the state of AdamW, not of SGD; make the optimizer a AdamW",
        ),
        (
            groups_by_dims,
            "group 0 of the optimizer (layers.0.weight, layers.2.weight, layers.4.weight) has no group of the same "
            "parameters in the checkpoint; only in the checkpoint's: layers.0.bias, layers.2.bias, layers.4.bias; make "
            "the same groups as the run that was saved",
        ),
        (
            lambda model: torch.optim.AdamW([*model.layers[0].parameters()]),
            "group 0 of the optimizer (layers.0.weight, layers.0.bias) has no group of the same parameters in the "
            "checkpoint; only in the checkpoint's: layers.2.bias, layers.2.weight, layers.4.bias and 1 more",
        ),
        (
            lambda model: torch.optim.AdamW(Perceptron().parameters()),
            "group 0 of the optimizer has a tensor of shape [48, 24] that is no parameter of Perceptron; make the "
            "optimizer from the parameters of the model that is saved or loaded (parallel.parameters())",
        ),
    ],
    ids=["another optimizer", "other groups", "fewer parameters", "another model"],
)
def test_other_optimizers_and_groups_are_refused_before_anything_changes(optimizer_of, message, tmp_path):
    model, optimizer = perceptron()
    train(model, optimizer, 1)
    sw.checkpoint.save(tmp_path, model, optimizer, step=1)
    fresh, _ = perceptron(seed=1)
    before = {name: tensor.clone() for name, tensor in fresh.state_dict().items()}
    with pytest.raises(CheckpointError) as refused:
        sw.checkpoint.load(tmp_path, fresh, optimizer_of(fresh))
    assert message in str(refused.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in fresh.state_dict().items())


def test_a_renamed_module_takes_its_optimizer_s_state_with_it(tmp_path):
    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.stack = Perceptron().layers

        def forward(self, x):
            return self.stack(x.flatten(1))

    model, optimizer = perceptron()
    train(model, optimizer, 2)
    sw.checkpoint.save(tmp_path, model, optimizer, step=2)
    other = Other()
    its = OPTIMIZERS["AdamW"](other.parameters())
    with pytest.raises(CheckpointError, match=r"layers\.0"):
        sw.checkpoint.load(tmp_path, other, its)
    sw.checkpoint.load(tmp_path, other, its, rename={"layers.*": "stack.*"})
    same(optimizer, its)
    assert train(other, its, 2) == train(model, optimizer, 2)


def test_without_strict_what_fits_is_loaded_and_the_rest_named(tmp_path):
    class Longer(Perceptron):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(12, 3)

    model, optimizer = perceptron()
    train(model, optimizer, 2)
    sw.checkpoint.save(tmp_path, model, optimizer, step=2)
    longer = Longer()
    its = OPTIMIZERS["AdamW"](longer.parameters())
    loaded = sw.checkpoint.load(tmp_path, longer, its, strict=False)
    assert set(loaded.skipped) == {"model.last.weight", "model.last.bias"}
    assert torch.equal(longer.layers[0].weight, model.layers[0].weight)
    assert torch.equal(
        its.state[longer.layers[0].weight]["exp_avg"], optimizer.state[model.layers[0].weight]["exp_avg"]
    )
    assert longer.last.weight not in its.state


def test_values_that_would_run_code_when_read_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"run\.extra is a dict.*weights_only"):
        sw.checkpoint.save(tmp_path, nn.Linear(2, 2), step=1, extra={"path": tmp_path})


def test_the_newest_is_named_and_a_directory_that_cannot_be_is_an_error_of_the_wait(tmp_path):
    model, optimizer = perceptron()
    sw.checkpoint.save(tmp_path, model, optimizer, step=1)
    assert sw.checkpoint.newest(tmp_path) == "step-00000001"
    assert sw.checkpoint.newest(tmp_path / "nowhere") is None
    (tmp_path / "blocked").write_text("a file where the directory should be")
    sw.checkpoint.save(tmp_path / "blocked", model, optimizer, step=2, asynchronous=True)
    with pytest.raises(CheckpointError, match="blocked"):
        sw.checkpoint.wait(model)


def test_a_plain_file_is_of_a_model_alone(tmp_path):
    model, _ = perceptron()
    torch.save({"epoch": 3, "model": model.state_dict()}, tmp_path / "epoch_3.pth")
    fresh, its = perceptron(seed=1)
    with pytest.raises(UsageError, match="as the state dict of a model alone; leave out optimizer"):
        sw.checkpoint.load(tmp_path / "epoch_3.pth", fresh, its)
    assert sw.checkpoint.load(tmp_path / "epoch_3.pth", fresh).name == "epoch_3.pth"
    assert all(torch.equal(t, model.state_dict()[name]) for name, t in fresh.state_dict().items())
