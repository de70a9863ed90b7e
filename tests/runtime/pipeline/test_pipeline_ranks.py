"""Training through pipeline stages on real ranks, with what a script does in between, and on another number of them."""

import shutil

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import shardwright as sw
from pages import DOCS, run_blocks
from ranks import run_ranks
from whole import splitting_hardware

STEPS = 5


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words):
        x = self.words(words)
        for layer in self.layers:
            x = x + F.dropout(F.gelu(layer(x)), 0.2, self.training)
        return self.head(x)


def loss_fn(model, batch):
    words, labels = batch
    return F.cross_entropy(model(words).flatten(0, 1), labels.flatten(), ignore_index=0)


def outputs(model, batch):
    return model(batch[0])


def batches():
    """Batches of 8 rows, which microbatches divide, and of 7."""
    generator = torch.Generator().manual_seed(1)
    found = [torch.randint(0, 11, (2, 8, 7), generator=generator) for _ in range(2 * STEPS)]
    return [(words[: 8 - number % 2], labels[: 8 - number % 2]) for number, (words, labels) in enumerate(found)]


def train(folder, first, last, mesh=None, microbatches=None):
    """Train from one step to another, from the checkpoint of the first one; losses, a clipped norm, and predictions."""
    torch.set_num_threads(1)
    sw.init(backend="gloo")
    torch.manual_seed(0)
    model, data = Language().double(), batches()
    how = {"predict_fn": outputs, "mesh": mesh, "microbatches": microbatches, "save_graphs": folder / "graphs"}
    how["hardware"] = splitting_hardware()  # on the usual one a single stage would do all that is small
    parallel = sw.parallelize(model, loss_fn, data[0], "data", batch="global", **how)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    if first:
        sw.checkpoint.load(folder, parallel, optimizer)
    found = []
    for batch in data[first:last]:
        with parallel.accumulate():
            parallel(batch).backward()
        loss = parallel(batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(parallel.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.item(), (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item()]
    sw.checkpoint.save(folder, parallel, optimizer, step=last)
    parallel.eval()
    with torch.no_grad():
        found.append(parallel(data[0]).item())
    states = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    stored = sum(here(tensor).numel() for tensor in (*parallel.parameters(), *states))
    return found, parallel.predict(data[1], gather=True), parallel.full_state_dict(), stored


def here(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def test_two_stages_train_as_one_device_does(tmp_path):
    [(losses, predicted, _, whole)] = run_ranks(1, train, tmp_path / "alone", 0, STEPS)
    found = run_ranks(4, train, tmp_path / "stages", 0, STEPS, "pp=2,dp=2", 2)
    first, _, second, _ = (stored for *_, stored in found)
    assert first + second == whole  # the table, which both read, is sharded; each layer is on one stage
    assert max(first, second) < whole
    for of_stage, seen, *_ in found:
        torch.testing.assert_close(of_stage, losses, atol=1e-10, rtol=0)
        torch.testing.assert_close(seen, predicted, atol=1e-10, rtol=0)
    assert "scheduled.send(" in next((tmp_path / "stages" / "graphs" / "rank_0").glob("*execute*")).read_text()


def predictions_of_few_layers(layers, how):
    """What a model with hardly any operators predicts, by its stages and without."""
    sw.init("gloo")
    torch.manual_seed(0)
    batch = torch.randn(8, 4).double(), torch.randint(0, 4, (8,))
    layers = [each for _ in range(layers) for each in (nn.Linear(4, 4), nn.Tanh())][:-1]
    model = nn.Sequential(*layers).double()
    alone = model(batch[0]).detach()
    parallel = sw.parallelize(model, classes, batch, batch="global", predict_fn=outputs, **how)
    parallel(batch).backward()
    return alone, parallel.predict(batch, gather=True)


def classes(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize(
    ("layers", "how"),
    [(1, {"mesh": "pp=2", "microbatches": 4}), (2, {"mesh": "pp=2", "microbatches": 2, "schedule": "interleaved"})],
)
def test_stages_predict_with_fewer_operators_than_there_are_stages(layers, how):
    """The loss has operators, too: what predicts is then where its parameters are, and other stages pass it on."""
    for alone, predicted in run_ranks(2, predictions_of_few_layers, layers, how):
        torch.testing.assert_close(predicted, alone, atol=1e-12, rtol=0)


def balanced(model, batch):
    """The loss, and one that the first stage alone knows of, as losses of balance of experts are."""
    hidden = model[0](batch[0])
    balance = hidden.sigmoid().mean(0).square().sum()
    return classes(model[1:], (hidden, batch[1])) + balance


def evaluated():
    """The losses that an evaluation in stages gives, by its two ways, and the one of one device."""
    sw.init("gloo")
    torch.manual_seed(0)
    batch = torch.randn(8, 4).double(), torch.randint(0, 4, (8,))
    layers = nn.Linear(4, 16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)
    model = nn.Sequential(*layers).double()  # evaluated by a plan of its own, without the dropout
    alone = balanced(model.eval(), batch).item()
    model.train()
    how = {"batch": "global", "mesh": "pp=2", "hardware": splitting_hardware()}
    parallel = sw.parallelize(model, balanced, batch, "data", **how).eval()
    with torch.no_grad():
        return alone, parallel(batch).item(), parallel.evaluate(batch).loss


def test_a_loss_of_which_stages_know_parts_is_evaluated_without_gradients():
    for alone, *found in run_ranks(2, evaluated):
        assert found == pytest.approx([alone, alone], rel=0, abs=1e-12)


@pytest.mark.slow
def test_what_two_stages_have_saved_goes_on_as_three_and_as_none(tmp_path):
    [(losses, predicted, state, _)] = run_ranks(1, train, tmp_path / "alone", 0, 2 * STEPS)
    run_ranks(4, train, tmp_path / "stages", 0, STEPS, "pp=2,dp=2", 2)
    for ranks, how in ((3, ("pp=3", 4)), (2, ("dp=2", None))):
        folder = shutil.copytree(tmp_path / "stages", tmp_path / how[0])
        for found, of_stage, held, _ in run_ranks(ranks, train, folder, STEPS, 2 * STEPS, *how):
            torch.testing.assert_close(found, losses[2 * STEPS :], atol=1e-10, rtol=0)
            torch.testing.assert_close(of_stage, predicted, atol=1e-10, rtol=0)
            torch.testing.assert_close(dict(held), dict(state), atol=1e-10, rtol=0)


@pytest.mark.slow
def test_the_blocks_of_the_page_run(tmp_path):
    assert run_blocks(DOCS / "training/pipelines.md", tmp_path) == ["python", "bash", "text"]
