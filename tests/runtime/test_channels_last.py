"""A model or a batch in `torch.channels_last` stays so in a program, and nothing else is brought into it."""

import copy

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import shardwright as sw
from ranks import run_ranks


class ConvolutionFormats(TorchDispatchMode):
    """Notes whether the images and the weight of each convolution have their channels last in memory."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.convolution.default:
            self.found.append([not tensor.is_contiguous() for tensor in args[:2]])
        return function(*args, **(kwargs or {}))


class Network(nn.Module):
    """Convolutions of colours, with a stride, and pointwise ones, whose result is an output beside the loss."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.second = nn.Conv2d(16, 32, 3, 2, padding=1)
        self.third = nn.Sequential(nn.Hardswish(), nn.MaxPool2d(2), nn.Conv2d(32, 16, 1))
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        maps = self.third(self.second(self.first(x)))
        return maps, self.head(maps.mean((2, 3)))


def loss_fn(model, batch):
    maps, logits = model(batch[0])
    return nn.functional.cross_entropy(logits, batch[1]), maps


def step(function, model, batch):
    """Loss, gradients, and how the convolutions, the output and the gradients lie in memory."""
    with ConvolutionFormats() as formats:
        loss, maps = function(batch)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return loss.detach(), gradients, formats.found, maps.stride()


CASES = [(True, False), (False, True)]


def both_of_each():
    sw.init()
    return [both(*case) for case in CASES]


def both(model_last, batch_last):
    torch.manual_seed(0)
    model, images = Network(), torch.randn(8, 3, 16, 16)
    model = model.to(memory_format=torch.channels_last) if model_last else model
    images = images.to(memory_format=torch.channels_last) if batch_last else images
    batch, plain = (images, torch.randint(5, (8,))), copy.deepcopy(model)
    parallel = sw.parallelize(model, loss_fn, batch, "data", batch="global")
    return step(lambda batch: loss_fn(plain, batch), plain, batch), step(parallel, parallel, batch)


def test_images_lie_in_memory_as_in_plain_pytorch():
    for found in run_ranks(2, both_of_each):
        for (model_last, batch_last), (plain, ours) in zip(CASES, found, strict=True):
            torch.testing.assert_close(ours[:2], plain[:2], rtol=1e-5, atol=1e-6)
            assert ours[2:] == plain[2:]
            assert ours[2][1] == [model_last or batch_last, model_last]
