"""The models of the zoo: their size and shape, and that any plan of them gives what one device gives."""

import importlib

import pytest
import torch

from shardwright.training.zoo import GPT, resnet18, resnet50


def parameters(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("make", "count"), [(resnet18, 11_689_512), (resnet50, 25_557_032)])
def test_resnets_have_the_published_number_of_parameters(make, count):
    with torch.device("meta"):
        model = make(1000, stem="imagenet")
        assert parameters(model) == count
        assert model(torch.empty(2, 3, 224, 224)).shape == (2, 1000)


def test_rotary_attention_depends_on_distances_alone():
    module = importlib.import_module("shardwright.training.zoo.models.gpt")
    torch.manual_seed(0)
    turns = [table.double() for table in module.rotary_turns(20, 8)]
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)

    def at(x, position):
        return module.rotate(x, *(table[position : position + 1] for table in turns))

    def product(i, j):
        return (at(q, i) * at(k, j)).sum()

    torch.testing.assert_close(product(3, 1), product(17, 15), rtol=1e-5, atol=1e-5)
    assert abs(product(3, 1) - product(3, 2)) > 1e-3
    torch.testing.assert_close(at(q, 7).norm(), q.norm(), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"width": 10, "heads": 4}, "a multiple of the heads, got width=10, heads=4"),
        ({"width": 12, "heads": 4, "positions": "rotary"}, "expected an even width per head, got 12 / 4"),
        ({"positions": "sinus"}, "expected positions among learned, rotary, got 'sinus'"),
    ],
)
def test_arguments_that_do_not_fit(arguments, message):
    with pytest.raises(ValueError, match=message):
        GPT(5, **arguments)
    with pytest.raises(ValueError, match="expected a stem among cifar, imagenet, got 'mnist'"):
        resnet18(stem="mnist")
    with pytest.raises(ValueError, match=r"expected at most 4 tokens \(sequence_length\), got 5"):
        GPT(5, sequence_length=4)(torch.zeros(1, 5, dtype=torch.int64))
