"""Optimizers of configurations, what the weight decay spares, rates, and steps whose gradients overflow."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import shardwright as sw
from ranks import run_ranks
from shardwright.ocr.networks.crnn import CRNN, VGG7
from shardwright.ocr.optimizers import Lion, make_optimizer
from shardwright.ocr.options.sections import Optimizer, Scheduler
from shardwright.ocr.training import ApplyingScaler, make_schedule


def moved(options, lr=0.1, steps=3):
    """Where one parameter gets by gradients of 1, -2 and 4 for its three entries."""
    layer = nn.Linear(3, 1, bias=False).double()
    layer.weight.data = torch.tensor([[1.0, 2.0, -3.0]], dtype=torch.float64)
    optimizer = make_optimizer(options, layer, lr)
    for step in range(steps):
        layer.weight.grad = torch.tensor([[1.0, -2.0, 4.0 * step]], dtype=torch.float64)
        optimizer.step()
    return layer.weight.detach()


def test_lion_makes_the_steps_of_its_paper():
    weight, mean = torch.tensor([[1.0, 2.0, -3.0]], dtype=torch.float64), torch.zeros(1, 3, dtype=torch.float64)
    for step in range(3):
        gradient = torch.tensor([[1.0, -2.0, 4.0 * step]], dtype=torch.float64)
        update = torch.sign(0.8 * mean + 0.2 * gradient) + 0.01 * weight
        weight, mean = weight - 0.1 * update, 0.95 * mean + 0.05 * gradient
    options = Optimizer(opt="lion", beta1=0.8, beta2=0.95, weight_decay=0.01, filter_bias_and_bn=False)
    torch.testing.assert_close(moved(options), weight)
    assert Lion([nn.Parameter(torch.zeros(1))]).defaults["betas"] == (0.9, 0.99)


def test_the_weight_decay_of_adam_is_part_of_the_gradient_and_that_of_adamw_is_not():
    for opt, kind in (("Adam", torch.optim.Adam), ("adamw", torch.optim.AdamW)):
        weight = nn.Parameter(torch.tensor([[1.0, 2.0, -3.0]], dtype=torch.float64))
        plain = kind([weight], lr=0.1, betas=(0.5, 0.9), weight_decay=0.2)
        for step in range(3):
            weight.grad = torch.tensor([[1.0, -2.0, 4.0 * step]], dtype=torch.float64)
            plain.step()
        options = Optimizer(opt=opt, beta1=0.5, beta2=0.9, weight_decay=0.2)
        torch.testing.assert_close(moved(options), weight.detach())


SPARED = [
    ({"filter_bias_and_bn": True}, "all"),
    ({"filter_bias_and_bn": False}, "none"),
    ({"filter_bias_and_bn": False, "no_weight_decay_params": ("beta", "gamma", "bias")}, "all"),
    ({"filter_bias_and_bn": True, "no_weight_decay_params": ("gamma",)}, "gamma"),
    ({"no_weight_decay_params": ("gamma",), "grouping_strategy": "filter_norm_and_bias"}, "all"),
]


@pytest.mark.parametrize(("keys", "spared"), SPARED)
def test_parameters_are_spared_the_weight_decay_by_the_names_that_mindspore_has(keys, spared):
    model = CRNN(VGG7(4), 7, 5)
    optimizer = make_optimizer(Optimizer(opt="adamw", weight_decay=0.1, **keys), model, 0.1)
    groups = {group["weight_decay"]: {id(p) for p in group["params"]} for group in optimizer.param_groups}
    gammas = {id(module.weight) for module in model.modules() if isinstance(module, nn.BatchNorm2d)}
    vectors = {id(parameter) for parameter in model.parameters() if parameter.ndim == 1}
    assert len(gammas) == 3
    assert groups.get(0.0, set()) == {"all": vectors, "none": set(), "gamma": gammas}[spared]
    assert sum(map(len, groups.values())) == len(list(model.parameters()))


def test_a_cosine_falls_over_its_decay_epochs_and_stays():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    options = Scheduler(scheduler="cosine_decay", lr=1.0, min_lr=0.1, num_epochs=10, warmup_epochs=2, decay_epochs=4)
    schedule, rates = make_schedule(options, optimizer, 5), []
    for _ in range(50):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates[9] == pytest.approx(1.0)
    assert rates[10 + 10] == pytest.approx(0.55)  # half of the cosine
    assert rates[30:] == pytest.approx([0.1] * 20)
    assert min(rates[10:30]) > 0.1


@pytest.mark.parametrize("clipped", [False, True])
def test_a_step_that_overflows_is_made_where_it_is_not_to_be_dropped(clipped):
    for kind, made in ((torch.amp.GradScaler, False), (ApplyingScaler, True)):
        weight = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        scaler = kind("cpu", init_scale=4.0, backoff_factor=0.5)
        for gradient in (torch.tensor([8.0, 4.0]), torch.tensor([4.0, float("inf")])):
            scaler.scale(torch.zeros(()))
            weight.grad = gradient
            if clipped:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert weight[0] == (-2.0 if made else -1.0)
        assert bool(torch.isfinite(weight[1])) is not made
        assert scaler.get_scale() == 2.0


def lion_trained(pins):
    """The losses of five steps of a network on this rank, and whether a weight of it is split."""
    sw.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    images = torch.randn(8, 6, dtype=torch.float64)
    parallel = sw.parallelize(
        model, lambda m, x: m(x).square().mean(), images, "semi-auto" if pins else "single",
        mesh="tp=2" if pins else None, pins=pins, batch="global", optimizer=Lion,
    )  # fmt: skip
    optimizer, losses = make_optimizer(Optimizer(opt="lion", weight_decay=0.1), parallel.module, 0.01), []
    for _ in range(5):
        loss = parallel(images)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, any(isinstance(parameter, DTensor) for parameter in parallel.parameters())


def test_lion_trains_split_parameters_as_whole_ones():
    split, whole = run_ranks(2, lion_trained, {"0": ((1, 1), (2, 1))}), run_ranks(1, lion_trained, None)
    assert split[0][0] == pytest.approx(whole[0][0], rel=1e-12)
    assert split[0][0] == split[1][0]
    assert (split[0][1], whole[0][1]) == (True, False)
