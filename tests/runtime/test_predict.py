"""Predictions by predict_fn, of batches without labels: captured and by DistributedDataParallel, as on one device."""

import copy
import warnings

import pytest
import torch
from torch import nn

import shardwright as sw
from models import Branching, Perceptron, classify, perceptron_batch
from ranks import run_ranks
from shardwright.errors import ShardwrightError

PLANS = {"data": {"mode": "data"}, "split": {"mode": "auto", "search": "propagation"}, "eager": {"mode": "data"}}


class Trained(nn.Module):
    """Has a parameter that predictions return beside their rows, and another mode for training."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.drop, self.temperature = inner, nn.Dropout(0.5), nn.Parameter(torch.tensor([2.0, 3.0]))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.drop(self.inner(x)) / self.temperature.sum()


def predictions(plan, rows):
    """What is predicted on this rank and by plain PyTorch, whole and this rank's part, and what is said."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore")
    world = sw.init()
    sw.set_seed(1)
    model, factor = Trained(Branching() if plan == "eager" else Perceptron()), torch.tensor(1.0)
    plain = copy.deepcopy(model).eval()

    def best(model, batch):
        logits = model(batch["x"]) * factor
        return {"logits": logits, "classes": [logits.argmax(1) > 5], "temperature": model.temperature}

    options = {"predict_fn": best, "batch": "local", **PLANS[plan]}
    at = slice(world.rank, world.rank + 1 if world.rank < world.size - 1 else None)  # uneven on purpose
    parallel = sw.parallelize(model, classify, tuple(t[at] for t in perceptron_batch(8)), **options)
    x, _ = perceptron_batch(rows, seed=3)
    found, expected = [], []
    for value in (1.0, 3.0):
        factor.fill_(value)
        found += [parallel.predict({"x": x[at]}), parallel.predict({"x": x[at]}, gather=False)["logits"]]
        with torch.no_grad():
            whole = best(plain, {"x": x})
        expected += [whole, whole["logits"][at]]
    if plan != "eager":  # each value was predicted with twice
        found.append(model.calls / 2)
        expected.append(plain.calls)
    bad = said(lambda: parallel.predict(x[at]))
    return found, expected, model.training, bad


def said(do):
    try:
        return str(do())
    except (ShardwrightError, TypeError, IndexError) as error:
        return str(error)


def under_every_plan(rows):
    return {plan: predictions(plan, rows) for plan in PLANS}


def test_predictions_of_batches_without_labels_are_those_of_one_device():
    for by_plan in run_ranks(2, under_every_plan, 7):
        for plan, (found, expected, training, bad) in by_plan.items():
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
            assert found[0]["logits"].shape == (7, 12)
            assert training
            assert "test_predict.py" in bad or plan == "eager"


def unpredictable(plan):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sw.init()
    batch, inner = perceptron_batch(8), Branching() if plan == "eager" else Perceptron()
    parallel = sw.parallelize(inner, lambda m, b: classify(m, b)[0], batch, batch="global", **PLANS[plan])
    mean = sw.parallelize(inner, classify, batch, batch="global", predict_fn=lambda m, b: m(b).mean(), **PLANS[plan])
    return said(lambda: parallel.predict(batch)), said(lambda: mean.predict(batch[0]))


def test_predictions_that_nobody_knows_are_refused():
    for nothing, mean in run_ranks(2, unpredictable, "eager"):
        assert nothing.startswith("predict gives what the loss function returns beside the loss, and it returns the lo")
        assert mean.startswith("ranks predict different tensors of shape [], which have no row for each sample")
    [(nothing, mean)] = run_ranks(1, unpredictable, "data")
    assert "To predict otherwise than the loss function does, such as without labels, pass sw.parallelize(" in nothing
    assert float(mean.split("(")[1][:-1]) == pytest.approx(0, abs=1)


class Sampling(nn.Module):
    """Draws in each prediction, as Monte Carlo dropout does."""

    def __init__(self):
        super().__init__()
        self.inner, self.drop = Perceptron(), nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.inner(x))


def drawn(plan):
    """What is drawn in predictions and evaluations."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    sw.init()
    sw.set_seed(1)
    batch, options = perceptron_batch(8), {"batch": "global", **PLANS[plan]}
    sampled = sw.parallelize(
        Sampling(), classify, batch, predict_fn=lambda m, b: nn.functional.dropout(m(b), 0.5), **options
    )
    samples = [sampled.predict(batch[0]) for _ in range(2)]
    sampled.eval()
    sampled.module.drop.train()
    with torch.no_grad():
        samples += [sampled(batch)[0] for _ in range(2)]
    return samples


def trained_beside(evaluations):
    """The losses of training with dropout, what is drawn beside it, and what the steps' random numbers depend on."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    sw.init()
    sw.set_seed(1)
    batch = perceptron_batch(8)
    parallel = sw.parallelize(
        Sampling(), classify, batch, "data", batch="global", predict_fn=lambda m, b: nn.functional.dropout(m(b), 0.5)
    )
    losses, samples = [], []
    for _ in range(3):
        losses.append(float(parallel(batch)[0]))
        samples += [parallel.predict(batch[0]) for _ in range(evaluations)]
    state = parallel.random_state()
    parallel.load_random_state({"seed": state["seed"], "step": 0})  # as of an older checkpoint
    again = [float(parallel(batch)[0]), parallel.predict(batch[0])]
    parallel.load_random_state(state)
    return losses, samples, state, again, parallel.predict(batch[0])


def test_training_draws_the_same_however_often_one_predicts():
    [(losses, _, state, _, _)] = run_ranks(1, trained_beside, 0)
    [(beside, samples, counted, again, following)] = run_ranks(1, trained_beside, 2)
    assert len(set(losses)) == 3
    assert beside == losses
    assert (state["step"], state["evaluations"]) == (3, 0)
    assert (counted["step"], counted["evaluations"]) == (3, 6)
    assert again[0] == losses[0]
    assert torch.equal(again[1], samples[0])
    assert not any(torch.equal(a, b) for a in [following, *samples] for b in [following, *samples] if a is not b)


def test_each_prediction_draws_other_numbers_and_the_same_on_any_number_of_ranks():
    [samples] = run_ranks(1, drawn, "data")
    assert not torch.equal(samples[0], samples[1])
    assert samples[2] != samples[3]
    for found in run_ranks(2, drawn, "split"):
        torch.testing.assert_close(found, samples, rtol=1e-12, atol=1e-12)
