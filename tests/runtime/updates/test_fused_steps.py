"""Optimizers of parallel models make their steps by torch's fused kernels, where these give the same."""

import copy
import importlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import shardwright as sw
from ranks import run_ranks
from shardwright.runtime.updates import optimizers
from shardwright.runtime.updates.optimizers import note_trained

SHAPES = [(8, 6, 3, 3), (1003,), (5, 7), (0, 4)]
SETTINGS = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
    (torch.optim.Adam, {"weight_decay": 0.1, "amsgrad": True}),
    (torch.optim.Adam, {"betas": (0.5, 0.9), "eps": 1e-4, "maximize": True}),
    (torch.optim.AdamW, {"weight_decay": 0.3}),
]


class Kernels(TorchDispatchMode):
    """Counts the fused kernels that are called."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls += "_fused_" in str(function)
        return function(*args, **(kwargs or {}))


def made(kind, settings, dtype=torch.float64, laid_out=torch.contiguous_format):
    generator = torch.Generator().manual_seed(1)
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    parameters[0].data = parameters[0].data.to(memory_format=laid_out)
    return parameters, kind(parameters, **settings)


def stepped(parameters, optimizer, steps=5, left_out=None):
    """How many kernels the steps call; the parameter of that number has no gradient in the second one."""
    with Kernels() as kernels:
        for step in range(steps):
            generator = torch.Generator().manual_seed(step)
            for number, parameter in enumerate(parameters):
                gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
                parameter.grad = None if (step, number) == (1, left_out) else gradient
            optimizer.step()
    return kernels.calls


def same(ours, plain, **tolerance):
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, **tolerance)


@pytest.mark.parametrize(("kind", "settings"), SETTINGS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_steps_are_those_of_the_loops(kind, settings, dtype, tolerance):
    ours, plain = made(kind, settings, dtype), made(kind, settings, dtype)
    note_trained(ours[0])
    calls = stepped(*ours, left_out=1)
    assert stepped(*plain, left_out=1) == 0, "an optimizer of no parallel model"
    assert calls >= 3, "all steps but those that make states"
    same(ours[0], plain[0], rtol=tolerance, atol=tolerance)
    mine, other = (optimizer.state_dict() for _, optimizer in (ours, plain))
    assert mine["param_groups"] == other["param_groups"], "the steps leave no trace in the settings"
    state = mine["state"], other["state"]
    assert state[0].keys() == state[1].keys()
    for number, kept in state[0].items():
        same(
            [value for value in kept.values() if value is not None],
            [value for value in state[1][number].values() if value is not None],
            rtol=tolerance, atol=tolerance,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "settings", "dtype", "laid_out"),
    [
        (torch.optim.AdamW, {}, torch.float64, torch.channels_last),
        (torch.optim.AdamW, {}, torch.bfloat16, torch.contiguous_format),
        (torch.optim.AdamW, {"lr": torch.tensor(1e-3)}, torch.float64, torch.contiguous_format),
        (torch.optim.AdamW, {"foreach": False}, torch.float64, torch.contiguous_format),
        (torch.optim.AdamW, {"fused": False}, torch.float64, torch.contiguous_format),
        (torch.optim.SGD, {"foreach": True}, torch.float64, torch.contiguous_format),
        (torch.optim.Adagrad, {}, torch.float64, torch.contiguous_format),
        (torch.optim.NAdam, {}, torch.float64, torch.contiguous_format),
    ],
)
def test_where_kernels_would_give_something_else_or_the_user_has_chosen_steps_are_left_alone(
    kind, settings, dtype, laid_out
):
    ours, plain = made(kind, settings, dtype, laid_out), made(kind, settings, dtype, laid_out)
    note_trained(ours[0])
    assert stepped(*ours) == 0
    stepped(*plain)
    same(ours[0], plain[0], rtol=0, atol=0)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_autograd_learns_that_a_step_has_written_to_its_parameters(kind):
    parameters, optimizer = made(kind, {"lr": 0.1})
    note_trained(parameters)
    stepped(parameters, optimizer, steps=2)
    loss = sum(parameter.square().sum() for parameter in parameters)
    assert stepped(parameters, optimizer, steps=1) == 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.fixture
def meta_for_gpu(monkeypatch):
    """Tensors without values on the device meta stand for those of a GPU."""
    monkeypatch.setattr(optimizers, "_DEVICES", ("meta",))
    torchs = importlib.import_module("torch.optim.optimizer")
    monkeypatch.setattr(torchs, "_get_fused_kernels_supported_devices", lambda: ["meta"])


@pytest.mark.parametrize(
    ("dtype", "calls"), [(torch.float32, 1), (torch.int64, 0)], ids=["a count of steps in float32", "another"]
)
def test_on_gpus_the_count_of_steps_is_moved_to_the_kernels(meta_for_gpu, dtype, calls):
    parameters = [torch.nn.Parameter(torch.empty(5, 3, device="meta")) for _ in range(2)]
    optimizer = torch.optim.AdamW(parameters)
    note_trained(parameters)
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
        kept = {"exp_avg": torch.empty_like(parameter), "exp_avg_sq": torch.empty_like(parameter)}
        optimizer.state[parameter] = {"step": torch.ones((), dtype=dtype), **kept}
    with Kernels() as kernels:
        optimizer.step()
    assert kernels.calls == calls
    counts = [optimizer.state[parameter]["step"].device.type for parameter in parameters]
    assert counts == ["meta" if calls else "cpu"] * 2
    assert optimizer.param_groups[0]["fused"] is None


def test_a_step_that_fails_leaves_the_settings_as_they_were():
    parameters, optimizer = made(torch.optim.AdamW, {})
    note_trained(parameters)
    stepped(parameters, optimizer)
    before = copy.deepcopy(optimizer.state_dict()["param_groups"])
    optimizer.param_groups[0]["lr"] = "high"
    with pytest.raises(TypeError):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = before[0]["lr"]
    assert optimizer.state_dict()["param_groups"] == before


def test_an_optimizer_that_stepped_before_its_model_was_split_takes_them_from_then_on():
    parameters, optimizer = made(torch.optim.AdamW, {})
    assert stepped(parameters, optimizer) == 0
    note_trained(parameters)
    assert stepped(parameters, optimizer) == 5


def of_parts(how, options):
    """How many kernels three steps of this rank call, and the whole parameters after them."""
    sw.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Tanh(), torch.nn.Linear(10, 5)).double()
    batch = torch.randn(4, 6).double(), torch.randn(4, 5).double()
    parallel = sw.parallelize(
        model, lambda m, b: torch.nn.functional.mse_loss(m(b[0]), b[1]), batch, how, batch="global", **options
    )
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.1)
    with Kernels() as kernels:
        for _ in range(3):
            parallel(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    return kernels.calls, {name: value.tolist() for name, value in parallel.full_state_dict().items()}


def test_parts_are_updated_by_them_too():
    [(single, expected)] = run_ranks(1, of_parts, "single", {})
    assert single > 0
    for calls, found in run_ranks(2, of_parts, "semi-auto", {"pins": {"0": ((1, 1), (2, 1), None)}, "mesh": "tp=2"}):
        assert calls > 0
        for name, values in expected.items():
            torch.testing.assert_close(
                torch.tensor(found[name], dtype=torch.float64),
                torch.tensor(values, dtype=torch.float64),
                rtol=1e-10,
                atol=1e-12,
            )
