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


@pytest.mark.parametrize(("make", "count", "channels"), [(resnet18, 11_173_962, 512), (resnet50, 23_520_842, 2048)])
def test_the_cifar_stem_keeps_small_images_whole(make, count, channels):
    with torch.device("meta"):
        model = make(10)
        assert parameters(model) == count
        images = torch.empty(2, 3, 32, 32)
        assert model.stem(images).shape == (2, 64, 32, 32)
        assert model.stages(model.stem(images)).shape == (2, channels, 4, 4)
        assert model(images).shape == (2, 10)


@pytest.mark.parametrize("zero_init", [True, False])
@pytest.mark.parametrize("make", [resnet18, resnet50])
@torch.no_grad()
def test_with_zeros_every_block_begins_as_its_shortcut(make, zero_init):
    model = make(width=4, zero_init=zero_init).eval()
    x = model.stem(torch.rand(1, 3, 8, 8))
    for stage in model.stages:
        for block in stage:
            y = block(x)
            assert torch.equal(y, block.shortcut(x).relu()) == zero_init
            x = y


def test_gpt_counts():
    d, v, s = 64, 50, 32
    layer = 4 * (d * d + d) + 8 * d * d + 5 * d + 4 * d
    assert parameters(GPT(v, d, 4, 3, s)) == v * d + s * d + 3 * layer + 2 * d
    assert parameters(GPT(v, d, 4, 3, s, tied=False, positions="rotary")) == 2 * v * d + 3 * layer + 2 * d
    assert GPT(v, d, 4, 3, s)(torch.zeros(2, 20, dtype=torch.int64)).shape == (2, 20, v)


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_gpt_sees_the_past_and_its_order_alone(positions):
    torch.manual_seed(0)
    model = GPT(11, 16, 2, 2, 8, positions=positions).eval()
    ids = torch.tensor([[1, 2, 3, 4, 5, 6]])
    before = model(ids)
    later, swapped = ids.clone(), ids[:, [1, 0, 2, 3, 4, 5]]
    later[0, 4:] = 0
    assert torch.equal(model(later)[:, :4], before[:, :4])
    assert not torch.allclose(model(later)[:, 4:], before[:, 4:])
    assert not torch.allclose(model(swapped)[:, 2:], before[:, 2:])


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


def test_other_misfits():
    with pytest.raises(ValueError, match="expected a stem among cifar, imagenet, got 'mnist'"):
        resnet18(stem="mnist")
    with pytest.raises(ValueError, match=r"expected at most 4 tokens \(sequence_length\), got 5"):
        GPT(5, sequence_length=4)(torch.zeros(1, 5, dtype=torch.int64))
