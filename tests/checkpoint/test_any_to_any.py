"""What any ranks saved under any plan, any others load under any other: every bit of parameters and optimizer state."""

import itertools

import pytest
import torch

import shardwright as sw
from models import Transformer, next_token, transformer_batch
from ranks import run_ranks
from shardwright.compiler.mesh.dtensor import gathered
from shardwright.training.zoo.models.resnet import resnet18

RANKS = (1, 3, 4)
MODES = ("single", "data", "tensor", "grid", "auto")


def resnet():
    return resnet18(num_classes=10, width=12)


def classify(model, batch):
    x, y = batch
    return torch.nn.functional.cross_entropy(model(x), y)


def images(rows, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 3, 8, 8, generator=g), torch.randint(0, 10, (rows,), generator=g)


NETWORKS = {"transformer": (Transformer, next_token, transformer_batch), "resnet": (resnet, classify, images)}
# Megatron's split: one operator over its outputs, the next over its inputs.
PINS = {
    "transformer": lambda n: {"layers.*.up": ((1, 1, 1), (n, 1), None), "layers.*.down": ((1, 1, n), (1, n), None)},
    "resnet": lambda n: {
        "stages.3.*.conv1": ((1, 1, 1, 1), (n, 1, 1, 1)),
        "stages.3.*.conv2": ((1, n, 1, 1), (1, n, 1, 1)),
    },
}


def modes(ranks):
    """Those that differ on so many ranks."""
    return [m for m in MODES if not (m == "tensor" and ranks == 1) and not (m == "grid" and ranks < 4)]


def made(network, mode, ranks):
    make, loss_fn, batch_of = NETWORKS[network]
    options = {}
    if mode in ("tensor", "grid"):
        across = ranks if mode == "tensor" else ranks // 2
        options = {"pins": PINS[network](across), "mesh": f"tp={ranks}" if mode == "tensor" else f"dp=2,tp={across}"}
        mode = "semi-auto"
    parallel = sw.parallelize(make(), loss_fn, batch_of(8), mode, batch="global", **options)
    assert any(hasattr(p, "full_tensor") for p in parallel.parameters()) == (mode == "semi-auto") or mode == "auto"
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    return parallel, optimizer


def whole(parallel, optimizer):
    """Every tensor of the model and the optimizer, whole, by the names of parameters."""
    found = dict(parallel.full_state_dict())
    for name, parameter in parallel.named_parameters():
        for key, value in optimizer.state[parameter].items():
            found[f"{name} {key}"] = gathered(value)
    return found


def visit(folder, own, saved_before):
    """Save under each of ``own`` modes, then load under each what was saved; the names of all loads that differ."""
    torch.set_num_threads(1)
    ranks = sw.init().size
    differing, loads = [], 0
    for network in NETWORKS:
        runs = {}
        for mode in own:
            sw.set_seed(ranks * 100 + MODES.index(mode))
            runs[mode] = parallel, optimizer = made(network, mode, ranks)
            loss = parallel(NETWORKS[network][2](8))
            loss.backward()
            optimizer.step()
            where = f"{folder}/{network}-{ranks}-{mode}"
            sw.checkpoint.save(where, parallel, optimizer, step=1, extra={"losses": [loss.item()]})
            state = whole(parallel, optimizer)
            if torch.distributed.get_rank() == 0:
                torch.save(state, f"{where}/whole.pt")
        torch.distributed.barrier()
        for mode, (parallel, optimizer) in runs.items():
            for source in [*saved_before, *((ranks, other) for other in own)]:
                where = f"{folder}/{network}-{source[0]}-{source[1]}"
                with torch.no_grad():
                    for tensor in [*parallel.parameters(), *parallel.buffers()]:
                        tensor.zero_()
                optimizer.state.clear()
                loaded = sw.checkpoint.load(where, parallel, optimizer)
                expected, state = torch.load(f"{where}/whole.pt"), whole(parallel, optimizer)
                same = expected.keys() == state.keys() and all(torch.equal(v, state[k]) for k, v in expected.items())
                differing += [] if same and loaded.step == 1 else [f"{network}: {source} -> {(ranks, mode)}"]
                loads += 1
    return differing, loads


def go(folder, stops):
    """Visit some numbers of ranks with some modes, one after the other; how many loads there were."""
    saved, count = [], 0
    for ranks, own in stops:
        everyone = run_ranks(ranks, visit, str(folder), own, saved, timeout=1700)
        assert not [differing for differing, _ in everyone if differing]
        saved += [(ranks, mode) for mode in own]
        count += everyone[0][1]
    return count


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_pair_of_ranks_and_modes(tmp_path):
    up = [(ranks, modes(ranks)) for ranks in RANKS]
    sources = [(ranks, mode) for ranks, own in up for mode in own]
    loads = go(tmp_path / "up", up)
    down = [(ranks, modes(ranks)) for ranks in reversed(RANKS)]
    loads += go(tmp_path / "down", down)
    alike = sum(len(own) ** 2 for _, own in up)
    assert loads == 2 * (len(list(itertools.product(sources, sources))) + alike)


def of_an_optimizer_made_before(folder, mode, steps, resumes):
    """The loss after so many steps, of which the first two are those of a checkpoint, if it resumes."""
    sw.init()
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = {"pins": PINS["transformer"](2), "mesh": "tp=2"} if mode == "semi-auto" else {}
    parallel = sw.parallelize(model, next_token, transformer_batch(8), mode, batch="global", **options)
    if resumes:
        sw.checkpoint.load(folder, parallel, optimizer)
    for _ in range(steps):
        optimizer.zero_grad()
        parallel(transformer_batch(8)).backward()
        optimizer.step()
    if not resumes:
        sw.checkpoint.save(folder, parallel, optimizer, step=steps)
    return parallel(transformer_batch(8)).item()


@pytest.mark.slow
def test_an_optimizer_made_before_its_model_is_split_is_resumed(tmp_path):
    saved, on = str(tmp_path / "saved"), str(tmp_path / "on")
    run_ranks(1, of_an_optimizer_made_before, saved, "single", 2, False)
    [expected] = run_ranks(1, of_an_optimizer_made_before, on, "single", 4, False)
    for loss in run_ranks(2, of_an_optimizer_made_before, saved, "semi-auto", 2, True):
        assert loss == pytest.approx(expected, rel=1e-5)
