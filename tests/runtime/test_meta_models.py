"""Models on the meta device train as those with values do, and no rank ever holds the whole of what is split."""

from weakref import ref

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import shardwright as sw
from ranks import run_ranks
from shardwright.common.torch_private import OperatorMode
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.errors import UsageError
from shardwright.runtime import captured
from shardwright.runtime.placing.initialising import init_problem
from shardwright.runtime.placing.placing import place

CPU = torch.device("cpu")


class Tied(nn.Module):
    """With buffers, a module of torch's that sets what its child holds, and two that hold the same parameter."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(24, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        inner = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.ReLU())]
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), *inner, nn.Linear(64, 16))
        self.out = nn.Linear(16, 24)
        self.out.weight = self.words.weight

    def forward(self, ids):
        x = self.words(ids)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.out(self.layers(x.flatten(0, 1)))


def loss_fn(model, ids):
    return nn.functional.cross_entropy(model(ids), ids.flatten())


def resetting(module):
    """What `reset_parameters` sets, once more by torch's public name for MultiheadAttention."""
    if isinstance(module, nn.MultiheadAttention):
        module._reset_parameters()
    elif hasattr(module, "reset_parameters"):
        module.reset_parameters()


def scaled(module):
    """An initialiser as a script has it, which writes to data."""
    for parameter in module.parameters(recurse=False):
        parameter.data.normal_(0, 0.3)
    for name, buffer in module.named_buffers(recurse=False):
        buffer.fill_(1 if name == "running_var" else 0)


def plain(init):
    """The model as one device makes it without us."""
    with torch.device("meta"):
        model = Tied()
    model.to_empty(device="cpu")
    model.out.weight = model.words.weight  # which `to_empty` has torn apart
    torch.manual_seed(5)
    with torch.no_grad():
        model.apply(init)
    return model


def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(24, (8, 6), generator=generator) for _ in range(3)]


def trained(model, call):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for batch in batches():
        losses.append(call(batch))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [loss.item() for loss in losses]


def on_ranks(init, options):
    """The values at first and the losses; the most bytes that were held while the model was placed, and its bytes."""
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    sw.init("gloo")
    held = counting_place()
    with torch.device("meta"):
        model = Tied()
    whole = sum(tensor.nbytes for tensor in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # made before, as some scripts do
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with sw.parallelize(model, loss_fn, batches()[0], batch="global", init=init, **options) as parallel:
        assert torch.equal(torch.get_rng_state(), before)
        values = {name: tensor.clone() for name, tensor in parallel.full_state_dict().items()}
        losses = trained(parallel, parallel)
        optimizer.step()
        assert all(p.device == CPU for group in optimizer.param_groups for p in group["params"])
        return values, losses, held[0], whole


def counting_place():
    """The most bytes of tensors that live together while `place` runs, once it has run in this process."""
    most = []

    def counted(*args):
        known = {}

        def counting(operator, operands, kwargs):
            results = operator(*operands, **kwargs)
            for tensor in results if isinstance(results, (tuple, list)) else (results,):
                if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor) and not tensor.is_meta:
                    known[ref(tensor.untyped_storage())] = tensor.untyped_storage().nbytes()
            for memory in [memory for memory in known if memory() is None]:
                del known[memory]
            most[0] = max(most[0], sum(known.values()))
            return results

        most.append(0)
        with OperatorMode(counting):
            place(*args)

    captured.place = counted
    return most


def split(ranks):
    columns, rows = ((1, 1), (ranks, 1)), ((1, ranks), (1, ranks))
    pins = {f"layers.{i}": columns if i in (0, 4, 8) else rows for i in (0, 2, 4, 6, 8, 10)} | {"out": columns}
    return {"mode": "semi-auto", "pins": pins}


CASES = [pytest.param(2, scaled, {"mode": "data"}, 2, marks=pytest.mark.slow), (2, None, split(2), 0.85)]


@pytest.mark.parametrize(("ranks", "init", "options", "share"), CASES, ids=["data", "split"])
def test_values_and_losses_are_those_of_one_device(ranks, init, options, share):
    torch.set_default_dtype(torch.float64)
    try:
        model = plain(init or resetting)
        expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        losses = trained(model, lambda batch: loss_fn(model, batch))
    finally:
        torch.set_default_dtype(torch.float32)
    for values, found, held, whole in run_ranks(ranks, on_ranks, init, options):
        assert values.keys() == expected.keys()
        assert all(torch.equal(values[name], tensor) for name, tensor in expected.items())
        assert found == pytest.approx(losses, rel=1e-10)
        assert held < share * whole


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(4))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        return x * self.scale


class Outer(nn.Sequential):
    """Sets what its child holds, beside what is its own."""

    def __init__(self, inner):
        super().__init__(inner)
        self.bias = nn.Parameter(torch.empty(4))

    def reset_parameters(self):
        self.bias.zero_()
        self[0].weight.data.fill_(1)


def put_another(module):
    module.weight, module.bias = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(4))


def half_with_values():
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].bias = nn.Parameter(torch.empty(4, device="meta"))
    return model


def on_meta(make):
    with torch.device("meta"):
        return make()


REFUSED = [
    (lambda: on_meta(lambda: nn.Sequential(Scale())), None,
     "0 (Scale) holds scale, count on the meta device and has no reset_parameters(); pass sw.parallelize(..., init="),
    (half_with_values, None, "0 (Linear) holds bias on the meta device and has values for weight, which they would l"),
    (lambda: on_meta(lambda: nn.Linear(4, 4)), lambda module: module.weight.data.zero_(),
     "init of the model (Linear) leaves bias without values; set it in place, as torch.nn.init and copy_() do"),
    (lambda: on_meta(Scale), lambda module: module.scale.fill_(1),
     "init of the model (Scale) leaves count without values; set it in place"),
    (lambda: on_meta(lambda: Outer(nn.Linear(4, 4))), None,
     "reset_parameters of the model (Outer) sets tensors of other modules, which are not there yet or no more; set in"),
    (lambda: on_meta(lambda: nn.Linear(4, 4)), lambda module: 1 / 0,
     "init of the model (Linear) failed: ZeroDivisionError: division by zero"),
    (lambda: on_meta(lambda: nn.Linear(4, 4)), put_another,
     "init of the model (Linear) puts something else in the place of weight; set it in place"),
    (lambda: nn.Linear(4, 4), put_another,
     "init= gives values to parameters and buffers on the meta device, and this model has none there; leave init= out"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "init", "text"), REFUSED)
def test_what_would_leave_other_values_is_refused(make, init, text):
    model = make()
    before = [*model.parameters(), *model.buffers()]
    with pytest.raises(UsageError) as refused:
        place(model, {}, Mesh(()), CPU, init)
    assert str(refused.value).startswith(text)
    assert all(a is b for a, b in zip(before, [*model.parameters(), *model.buffers()], strict=True))


def test_a_hook_of_a_parameter_that_is_replaced_is_refused():
    model = on_meta(lambda: nn.Linear(4, 4))
    model.weight.register_hook(lambda gradient: gradient)
    with pytest.raises(UsageError, match=r"weight has a hook \(register_hook\), and parameters are on the meta device"):
        place(model, {}, Mesh(()), CPU)


def test_what_cannot_be_called_is_no_init():
    assert init_problem(3) == "init=3 cannot be called; expected a function of a module, as Module.apply takes it"
