"""The trainer on several ranks, with each thing that people do to a training step, against plain PyTorch on one."""

import copy
import warnings

import pytest
import torch

import shardwright as sw
from models import NETWORKS, Branching
from ranks import run_ranks
from shardwright.errors import UsageError

# Splits by the batch, and by the parameters: the first operator pinned over its output channels or features.
MODES = {"data": ("data", {}), "tensor": ("semi-auto", {"pins": {"layers.0": ((1, 1), (2, 1), None)}, "mesh": "tp=2"})}


def batches_of(name, sizes):
    """A loader of whole global batches, as lists."""
    return [NETWORKS[name][2](rows, seed) for seed, rows in enumerate(sizes)]


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def frozen(model):
    next(iter(model.parameters())).requires_grad_(False)
    return model.parameters()


def groups(model):
    matrices = [p for p in model.parameters() if p.ndim > 1]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "lr": 1e-3},
    ]


GROUPINGS = {"all": lambda model: model.parameters(), "frozen": frozen, "groups": groups}


def by_trainer(name, mode, options, sizes, grouping, ema, trainer_options, dtype):
    """Losses by step, parameters, and what an evaluation gives, after a run of the trainer."""
    torch.set_num_threads(1)
    torch.set_default_dtype(dtype)
    sw.init()
    sw.set_seed(1)
    make, loss_fn, _ = NETWORKS[name]
    model = make()
    if grouping == "frozen":
        frozen(model)
    data = batches_of(name, sizes)
    parallel = sw.parallelize(model, loss_fn, data[0], mode, batch="global", **options)
    split = any(hasattr(p, "full_tensor") for p in parallel.parameters())
    assert split == (mode == "semi-auto"), "the plan of this test must split parameters exactly where it says so"
    losses = Losses()
    optimizer = torch.optim.AdamW(GROUPINGS[grouping](parallel.module), lr=1e-2)
    schedule = sw.cosine_schedule(optimizer, steps=10, warmup_steps=2)
    callbacks = [losses, *([sw.EMA(0.8)] if ema else [])]
    trainer = sw.Trainer(parallel, optimizer, callbacks, scheduler=schedule, **trainer_options)
    trainer.fit(data, epochs=2, validate=data[:1])
    state = {name: tensor.clone() for name, tensor in parallel.full_state_dict().items()}
    return losses.seen, state, trainer.evaluation, optimizer.param_groups[0]["lr"]


class Losses(sw.Callback):
    def __init__(self):
        self.seen = []

    def on_step_end(self, trainer):
        self.seen.append(trainer.loss.item())


def by_hand(name, sizes, grouping, ema, accumulate=1, clip_norm=None, dtype=torch.float64):
    """The same run as plain PyTorch has it: the micro-batches of a step as one batch, no trainer, no plan."""
    torch.set_default_dtype(dtype)
    sw.set_seed(1)
    make, loss_fn, _ = NETWORKS[name]
    model = make()
    data = batches_of(name, sizes)
    optimizer = torch.optim.AdamW(GROUPINGS[grouping](model), lr=1e-2)
    schedule = sw.cosine_schedule(optimizer, steps=10, warmup_steps=2)
    average = copy.deepcopy(model)
    losses = []
    try:
        for _ in range(2):
            for first in range(0, len(data), accumulate):
                batch = tuple(torch.cat(parts) for parts in zip(*data[first : first + accumulate], strict=True))
                result = loss_fn(model, batch)
                loss = result[0] if isinstance(result, tuple) else result
                optimizer.zero_grad()
                loss.backward()
                if clip_norm is not None:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
                optimizer.step()
                schedule.step()
                losses.append(loss.item())
                with torch.no_grad():
                    for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                        mean.copy_(0.8 * mean + 0.2 * parameter)
            evaluated = average if ema else model
            with torch.no_grad():
                result = loss_fn(evaluated, data[0])
    finally:
        torch.set_default_dtype(torch.float32)
    value = result[0] if isinstance(result, tuple) else result
    return losses, model.state_dict(), value.item(), optimizer.param_groups[0]["lr"]


CASES = {
    "accumulation of uneven batches": ([12, 7, 7, 12, 7], "all", False, {"accumulate": 2}),
    "accumulation and clipping": ([6, 6, 6, 6], "all", False, {"accumulate": 2, "clip_norm": 0.05}),
    "frozen parameters": ([12, 12], "frozen", False, {}),
    "parameter groups and EMA": ([12, 12], "groups", True, {}),
}


def cases_of(mode):
    """The modes take turns."""
    return dict(list(CASES.items())[list(MODES).index(mode) :: len(MODES)])


def every_case(mode):
    return {
        case: by_trainer("perceptron", *MODES[mode], sizes, grouping, ema, options, torch.float64)
        for case, (sizes, grouping, ema, options) in cases_of(mode).items()
    }


@pytest.mark.parametrize("mode", MODES)
def test_several_ranks_train_as_one_device_by_hand(mode):
    trained = run_ranks(3 if mode == "data" else 2, every_case, mode, timeout=110)
    for case, (sizes, grouping, ema, options) in cases_of(mode).items():
        losses, state, evaluated, rate = by_hand("perceptron", sizes, grouping, ema, **options)
        for theirs in (cases[case] for cases in trained):
            assert theirs[0] == pytest.approx(losses, rel=1e-10), case
            for name, tensor in state.items():
                torch.testing.assert_close(theirs[1][name], tensor, rtol=1e-9, atol=1e-11, msg=f"{case}: {name}")
            assert theirs[2].loss == pytest.approx(evaluated, rel=1e-10), case
            assert theirs[2].samples == sizes[0], case
            assert theirs[3] == pytest.approx(rate, rel=1e-12), case


PRECISIONS = {"bf16": 0.02, "fp16": 2e-3}  # with the relative deviation that their losses may have
THREE_STEPS = [12, 12, 12]


def every_precision(mode):
    how = MODES.get(mode, (mode, {}))
    return {
        precision: by_trainer("perceptron", *how, THREE_STEPS, "all", False, {"precision": precision}, torch.float32)
        for precision in PRECISIONS
    }


@pytest.fixture(scope="module")
def one_rank_in_lower_precision():
    return run_ranks(1, every_precision, "single")[0]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["data", "tensor"])
def test_lower_precisions_train_as_on_one_rank(mode, one_rank_in_lower_precision):
    exact, *_ = by_hand("perceptron", THREE_STEPS, "all", False, dtype=torch.float32)
    for theirs in run_ranks(2, every_precision, mode):
        for precision, tolerance in PRECISIONS.items():
            one = one_rank_in_lower_precision[precision]
            assert one[0] != exact, "the forward must have computed in the lower precision"
            assert one[0] == pytest.approx(exact, rel=5 * tolerance)
            assert theirs[precision][0] == pytest.approx(one[0], rel=tolerance)
            assert theirs[precision][2].loss == pytest.approx(one[2].loss, rel=tolerance)


def overflowing(mode, options):
    """Scales and first parameters over a run in fp16 whose scale is far too large at first."""
    torch.set_num_threads(1)
    sw.init()
    sw.set_seed(1)
    make, loss_fn, _ = NETWORKS["perceptron"]
    data = batches_of("perceptron", [12])
    parallel = sw.parallelize(make(), loss_fn, data[0], mode, batch="global", **options)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    schedule = sw.step_schedule(optimizer, every_steps=1, factor=0.5)
    trainer = sw.Trainer(parallel, optimizer, scheduler=schedule, precision="fp16", clip_norm=1.0)
    trainer.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22)
    before = {name: full(p).detach().clone() for name, p in parallel.named_parameters()}
    found = []
    for _ in range(10):
        trainer.fit(data)
        moved = any(not torch.equal(full(p), before[name]) for name, p in parallel.named_parameters())
        found.append((trainer.scaler.get_scale(), moved, optimizer.param_groups[0]["lr"]))
    return found


@pytest.mark.parametrize("mode", [pytest.param("data", marks=pytest.mark.slow), "tensor"])
def test_all_ranks_skip_the_steps_that_overflow_and_the_schedule_waits(mode):
    everyone = run_ranks(2, overflowing, *MODES[mode])
    assert everyone[0] == everyone[1]
    skipped = [rate for _, moved, rate in everyone[0] if not moved]
    assert skipped, "the first scale must overflow"
    assert set(skipped) == {0.1}
    assert everyone[0][-1][1]
    assert everyone[0][-1][2] == pytest.approx(0.1 * 0.5 ** (10 - len(skipped)))


def with_accuracy(model, batch):
    images, labels = batch
    logits = model(images)
    right = logits.argmax(1) == labels
    loss = torch.nn.functional.cross_entropy(logits, labels)
    return loss, {"accuracy": right.sum(), "mean": right.double().mean()}


def counted(images, batch_size):
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    world = sw.init()
    sw.set_seed(0)
    x, y = NETWORKS["perceptron"][2](images)
    dataset = torch.utils.data.TensorDataset(x, y)

    model = NETWORKS["perceptron"][0]()
    train, validate = sw.loader(dataset, 64), sw.loader(dataset, batch_size, evaluate=True)
    parallel = sw.parallelize(model, with_accuracy, train.sample_batch(), "data")
    trainer = sw.Trainer(parallel, torch.optim.SGD(parallel.parameters(), lr=0.1))
    evaluation = trainer.evaluate(validate)
    with torch.no_grad():
        loss, metrics = with_accuracy(model, (x, y))
    assert model.training
    return evaluation, loss.item(), metrics["accuracy"].item(), world.size


def test_an_evaluation_of_1001_images_on_3_ranks_counts_1001():
    for evaluation, loss, right, _ in run_ranks(3, counted, 1001, 128):
        assert evaluation.samples == 1001
        assert evaluation.loss == pytest.approx(loss, rel=1e-12)
        assert evaluation.metrics["accuracy"] * 1001 == pytest.approx(right, abs=1e-9)
        assert evaluation.metrics["mean"] == pytest.approx(right / 1001, rel=1e-12)


def uncaptured(batch_size):
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    sw.init()
    sw.set_seed(1)
    x, y = NETWORKS["perceptron"][2](50)
    dataset = torch.utils.data.TensorDataset(x, y)
    model = Branching()

    train, validate = sw.loader(dataset, 25), sw.loader(dataset, batch_size, evaluate=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it runs by DistributedDataParallel
        parallel = sw.parallelize(model, with_accuracy, train.sample_batch(), "data")
    trainer = sw.Trainer(parallel, torch.optim.SGD(parallel.parameters(), lr=0.1), accumulate=2, precision="bf16")
    trainer.fit(train)
    trainer = sw.Trainer(parallel, torch.optim.SGD(parallel.parameters(), lr=0.1))
    evaluation = trainer.evaluate(validate)
    with torch.no_grad():
        loss, metrics = with_accuracy(model, (x, y))
    return type(parallel).__name__, evaluation, loss.item(), metrics["accuracy"].item()


def test_what_cannot_be_captured_is_evaluated_exactly_too():
    for kind, evaluation, loss, right in run_ranks(3, uncaptured, 16):  # the last batch has two samples for three ranks
        assert kind == "EagerParallel"
        assert evaluation.samples == 50
        assert evaluation.loss == pytest.approx(loss, rel=1e-12)
        assert evaluation.metrics == pytest.approx({"accuracy": right / 50, "mean": right / 50}, rel=1e-12)


def by_torchs_loader():
    torch.set_num_threads(1)
    world = sw.init()
    sw.set_seed(1)
    make, loss_fn, batch_of = NETWORKS["perceptron"]
    dataset = torch.utils.data.TensorDataset(*batch_of(20))
    sampler = torch.utils.data.DistributedSampler(dataset, world.size, world.rank)
    loader = torch.utils.data.DataLoader(dataset, batch_size=5, sampler=sampler)
    parallel = sw.parallelize(make(), loss_fn, next(iter(loader)), "data", batch="local")
    orders = Orders(sampler)
    trainer = sw.Trainer(parallel, torch.optim.SGD(parallel.parameters(), lr=0.1), [orders])
    trainer.fit(loader, epochs=9, steps=5)
    return orders.seen, trainer.epoch, trainer.steps, parallel.samples(next(iter(loader)))


class Orders(sw.Callback):
    def __init__(self, sampler):
        self.sampler = sampler
        self.seen = []

    def on_epoch_begin(self, trainer):
        self.seen.append(list(self.sampler))


def test_torch_s_own_loader_is_shuffled_anew_each_epoch_and_steps_end_the_run():
    for orders, epoch, steps, samples in run_ranks(2, by_torchs_loader):
        assert len(orders) == 3
        assert orders[0] != orders[1] != orders[2]
        assert (epoch, steps, samples) == (3, 5, 10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "fp8"}, "precision='fp8' is unknown; choose one of float32, bf16, fp16"),
        ({"accumulate": 0}, "expected accumulate, batches per optimizer step, to be at least 1, got 0"),
        ({"clip_norm": 0}, "expected clip_norm to be more than 0, or None for no clipping, got 0"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(options, message):
    with pytest.raises(UsageError) as refused:
        sw.Trainer(None, None, **options)
    assert message in str(refused.value)
