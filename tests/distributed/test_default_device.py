"""torch.set_default_device moves what a script makes, and nothing of ours: every tensor of ours says its device."""

import ast
import re

import pytest
import torch
from torch import nn
from torch.utils._device import _device_constructors

import shardwright as sw
from ranks import run_ranks
from shardwright.common import package
from shardwright.distributed.ranks import Purpose, ranks_by_messages

MAKERS = {function.__name__ for function in _device_constructors()}
# Models are the script's: they are made on the device that it sets.
MODELS = ("training/zoo/models/", "ocr/networks/")


def undecided(source: str) -> list[str]:
    """The calls that make a tensor wherever the default device is."""
    return [
        ast.unparse(node)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "torch"
        and node.func.attr in MAKERS
        and not {"device", None} & {keyword.arg for keyword in node.keywords}
    ]


def test_every_tensor_of_ours_says_its_device():
    assert undecided("torch.zeros(3); torch.zeros(3, device=d); torch.zeros_like(x)") == ["torch.zeros(3)"]
    files = [
        path for path in package.FOLDER.rglob("*.py") if not str(path.relative_to(package.FOLDER)).startswith(MODELS)
    ]
    assert len(files) > 300
    texts = {str(path.relative_to(package.FOLDER)): path.read_text() for path in files}
    made = re.compile(rf"torch\.({'|'.join(MAKERS)})\b")
    found = {name: undecided(text) for name, text in texts.items() if made.search(text)}  # parsing takes long
    assert {name: calls for name, calls in found.items() if calls} == {}


class Rows(torch.utils.data.Dataset):
    def __init__(self):
        self.x = torch.randn(24, 6, generator=torch.Generator().manual_seed(3), device="cpu")

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return self.x[index].numpy(), float(self.x[index].sum())


class Network(nn.Module):
    def __init__(self, captured):
        super().__init__()
        self.captured = captured
        self.first, self.drop, self.last = nn.Linear(6, 8), nn.Dropout(0.25), nn.Linear(8, 1)

    def forward(self, x):
        if not self.captured and float(x.detach().abs().max()) > 100:  # which no capture follows
            return x
        return self.last(self.drop(self.first(x).relu()))


def loss_fn(model, batch):
    x, y = batch
    out = model(x)
    return nn.functional.mse_loss(out[:, 0], y.float()), out


def predict(model, batch):
    return model(batch[0])


def train(default, backend, captured, folder):
    """An epoch with what a script does beside it; the numbers of it."""
    torch.set_default_device(default)
    world = sw.init(backend)
    with torch.device("cpu"):
        torch.manual_seed(0)
        model = Network(captured)
    seen = []
    data = Rows()
    loader = sw.loader(data, 8, seed=1)
    sample = loader.sample_batch()
    parallel = sw.parallelize(model, loss_fn, sample, "data", predict_fn=predict, checks="full")
    assert (parallel.plan is not None) == captured
    optimizer = torch.optim.AdamW(parallel.parameters(), 0.01)
    for batch in loader:
        loss, _ = parallel(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(float(loss))
    sw.checkpoint.save(folder, parallel, optimizer, loader, step=len(seen), asynchronous=True)
    sw.checkpoint.load(folder, parallel, optimizer, loader)
    seen.append(float(parallel.evaluate(batch).loss))
    seen.append(float(parallel.predict(batch).sum()))
    told = ranks_by_messages(Purpose("asking")).gather(world.rank)
    assert told in (None, list(range(world.size)))
    group = sw.create_group(range(world.size))
    sw.destroy_group(group)
    return seen


@pytest.mark.parametrize(("backend", "captured"), [("shm", True), pytest.param("gloo", False, marks=pytest.mark.slow)])
def test_a_default_device_changes_no_number_and_breaks_nothing(backend, captured, tmp_path):
    """The device meta has no values: whatever lands there by mistake is an error or another number."""
    plain = run_ranks(2, train, "cpu", backend, captured, str(tmp_path / "plain"))
    assert run_ranks(2, train, "meta", backend, captured, str(tmp_path / "meta")) == plain
