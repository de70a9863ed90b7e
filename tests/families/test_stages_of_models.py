"""GPT, Llama, Mixtral and ResNet through stages and parts of every kind are those of one device."""

import copy
from functools import cache

import pytest
import torch
from exact_models import WORDS, llama, mixture
from torch.nn import functional as F

from rows import slow
from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.request import PlanRequest
from shardwright.training.zoo.models.gpt import GPT
from shardwright.training.zoo.models.resnet import BasicBlock, ResNet
from whole import run, same, splitting_hardware

EXPERTS = "*.mlp.experts"


def gpt():
    """With dropout, and a head whose weight is the embedding's."""
    torch.manual_seed(0)
    return GPT(WORDS, width=16, heads=4, layers=4, sequence_length=8, positions="rotary", tied=True, dropout=0.2)


def resnet():
    torch.manual_seed(0)
    return ResNet(BasicBlock, (1, 1, 1, 1), width=4)


MODELS = {
    "gpt": gpt,
    "llama": lambda: llama(4, 2, 8, layers=4, tie_word_embeddings=True),
    "mixtral": lambda: mixture("mixtral", layers=4),
    "resnet": resnet,
}


def batch_of(name, rows, seed=0):
    """Images, or words of which the first rows have few labels, so that microbatches have other counts."""
    generator = torch.Generator().manual_seed(seed)
    if name == "resnet":
        images = torch.randn(rows, 3, 8, 8, generator=generator, dtype=torch.float64)
        return images, torch.randint(0, 10, (rows,), generator=generator)
    words, labels = torch.randint(3, WORDS, (2, rows, 8), generator=generator)
    labels[: rows // 2, :6] = -100
    return words, labels


def loss_fn(model, batch):
    made = model(batch[0])
    logits = made if isinstance(made, torch.Tensor) else made.logits
    return F.cross_entropy(logits.flatten(0, -2), batch[1].flatten(), ignore_index=-100)


@cache
def captured_of(name, rows, experts):
    """A model, its graph, and what one device makes of it, of which each case here has others of the plans."""
    model, batch = MODELS[name]().double(), batch_of(name, rows)
    pins = {EXPERTS: ((experts, 1), (experts, 1), (experts, 1), (experts, 1, 1, 1), (experts, 1, 1))}
    captured = captured_step(model, loss_fn, batch, pins if experts > 1 else {})
    single = make_plan(captured, PlanRequest(Mesh(()), "single"))
    return model, captured, single, run(single, model, batch)


def plan_of(name, mesh, microbatches=None, schedule=None, rows=8):
    """The plan of a case: "auto" by prices that split all that can be, where the mesh has more than stages and rows."""
    sizes = Mesh.parse(mesh)
    experts = next((axis.size for axis in sizes.axes if axis.name == "ep"), 1)
    model, captured, single, expected = captured_of(name, rows, experts)
    search = {"search": "propagation"} if experts > 1 else {}
    mode = "data" if set(sizes.names) <= {"pp", "dp"} else "auto"
    request = PlanRequest(
        sizes, mode, hardware=splitting_hardware(), microbatches=microbatches, schedule=schedule, **search
    )
    return model, make_plan(captured, request), single, expected


# model, mesh, microbatches, schedule, rows: 4 layers in 3 stages are uneven, and so are 7 rows.
QUICK = [("gpt", "pp=2,tp=2", 2, None, 7), ("resnet", "pp=2,dp=2", 1, None, 7)]
LANGUAGES = ("gpt", "llama", "mixtral")
MANY = [
    ("gpt", "pp=3", 3, None, 7),
    ("gpt", "pp=2,dp=2,tp=2", 2, None, 7),
    *((name, mesh, microbatches, None, rows)
      for name in LANGUAGES for rows in (7, 8)
      for mesh, microbatches in (("dp=3", None), ("tp=4", None), ("pp=1,dp=2", 4), ("pp=2", 4), ("pp=4", 8),
                                 ("pp=2,dp=2", 3), ("pp=2,tp=4", 2), ("pp=4,dp=2", 4), ("pp=3", 4),
                                 ("pp=2,tp=2", 8), ("dp=2,tp=4", None))),
    *((name, mesh, microbatches, schedule, 8)
      for name in LANGUAGES for schedule in ("gpipe", "interleaved", "zb-h1")
      for mesh, microbatches in (("pp=2", 4), ("pp=2,dp=2", 2), ("pp=2,tp=2", 4))),
    *((name, mesh, microbatches, None, 8)
      for name in ("gpt", "llama")
      for mesh, microbatches in (("cp=2", None), ("cp=4", None), ("dp=2,cp=2", None), ("pp=2,cp=4", 2),
                                 ("pp=2,cp=2", 2), ("pp=4,cp=2", 4))),
    *(("mixtral", mesh, microbatches, None, 8)
      for mesh, microbatches in (("pp=2,ep=2", 4), ("ep=2", None), ("ep=4", None), ("dp=2,ep=2", None),
                                 ("pp=2,ep=4", 2), ("pp=4,ep=2", 2), ("pp=2,ep=2,tp=2", 2))),
    *(("resnet", mesh, microbatches, None, rows)
      for rows in (7, 8)
      for mesh, microbatches in (("dp=3", None), ("pp=2", 1), ("pp=4", 1), ("pp=3", 1), ("pp=2,dp=4", 1),
                                 ("pp=2,tp=2", 1))),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "mesh", "microbatches", "schedule", "rows"),
    [*QUICK, *slow(*MANY)],
)
def test_a_step_is_that_of_one_device(name, mesh, microbatches, schedule, rows):
    model, plan, _, expected = plan_of(name, mesh, microbatches, schedule, rows)
    assert (plan.stages is None) == ("pp" not in mesh)
    same(run(plan, model, batch_of(name, rows)), expected)


def trained(plan, model, name, rows):
    """The losses of five steps of AdamW on other batches, and the parameters behind them."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(5):
        found = run(plan, model, batch_of(name, rows, step), seed=step)
        losses.append(found["loss"].item())
        for label, parameter in model.named_parameters():
            parameter.grad = found[f"gradient of {label}"]
        optimizer.step()
        model.load_state_dict({**model.state_dict(), **{label.removeprefix("buffer "): value
                               for label, value in found.items() if label.startswith("buffer")}})  # fmt: skip
    return {"loss": torch.tensor(losses, dtype=torch.float64), **model.state_dict()}


STEPS = [
    ("gpt", "pp=2,dp=2", 2, None, 8),
    ("gpt", "pp=4,tp=2", 4, None, 8),
    ("llama", "pp=2,cp=2", 4, "interleaved", 8),
    ("mixtral", "pp=2,ep=2", 2, None, 8),
    ("resnet", "pp=2,dp=2", 1, None, 7),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh", "microbatches", "schedule", "rows"), STEPS)
def test_five_steps_are_those_of_one_device(name, mesh, microbatches, schedule, rows):
    model, plan, single, _ = plan_of(name, mesh, microbatches, schedule, rows)
    found, expected = (trained(each, model, name, rows) for each in (plan, single))
    for label, value in expected.items():
        torch.testing.assert_close(found[label], value, rtol=0, atol=1e-9, msg=label)
