"""The data sets that a configuration names."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.utils.data import TensorDataset

from shardwright.data import cifar, mnist
from shardwright.data.cifar import CIFAR10
from shardwright.data.images import RandomImages
from shardwright.data.mnist import MNIST
from shardwright.data.text import CharacterText
from shardwright.data.transforms import Compose, Normalise, RandomCrop, RandomHorizontalFlip, Transform
from shardwright.training.zoo.rows import Data, DataOptions, at_least

# Mean and deviation of the training images, by channel.
_MNIST_MOMENTS = ((0.1307,), (0.3081,))
_CIFAR10_MOMENTS = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))


@dataclass(frozen=True, kw_only=True)
class MnistData(DataOptions):
    """The files of MNIST, or digits in their form, normalised."""

    root: str = "data/mnist"


@dataclass(frozen=True, kw_only=True)
class Cifar10Data(DataOptions):
    """The files of CIFAR-10, or digits in their form, normalised; ``crop`` shifts by up to so many pixels."""

    root: str = "data/cifar10"
    crop: int = at_least(0, 4)
    flip: bool = True


@dataclass(frozen=True, kw_only=True)
class RandomData(DataOptions):
    """Images of noise with labels drawn from ``classes``: nothing can be learned from them, and no file is read."""

    samples: int = at_least(1, 5000)
    test_samples: int = at_least(1, 1000)
    shape: tuple[int, ...] = at_least(1, (3, 32, 32))
    classes: int = at_least(2, 2)


@dataclass(frozen=True, kw_only=True)
class CharacterData(DataOptions):
    """A text file, one character after the other; ``path`` null takes the text that comes with Shardwright."""

    path: str | None = None
    sequence_length: int = at_least(1, 64)


@dataclass(frozen=True, kw_only=True)
class TableData(DataOptions):
    """Rows of random numbers and the random numbers to be learned from them."""

    samples: int = at_least(1, 64)
    inputs: int = at_least(1, 32)
    outputs: int = at_least(1, 16)


def make_mnist(options: MnistData) -> Data:
    """Return the images of MNIST, normalised."""
    train, test = (MNIST(options.root, train=part, transform=Normalise(*_MNIST_MOMENTS)) for part in (True, False))
    return Data(train, test, mnist.CLASSES)


def make_cifar10(options: Cifar10Data) -> Data:
    """Return the images of CIFAR-10, normalised; those to train on are cropped and flipped as the options say."""
    normalise = Normalise(*_CIFAR10_MOMENTS)
    random: list[Transform] = [RandomCrop(cifar.SIDE, options.crop)] if options.crop else []
    random += [RandomHorizontalFlip()] if options.flip else []
    train = CIFAR10(options.root, train=True, transform=Compose([*random, normalise]))
    return Data(train, CIFAR10(options.root, train=False, transform=normalise), cifar.CLASSES)


def make_random(options: RandomData) -> Data:
    """Return random images to train on, and others to test on."""
    train, test = (
        RandomImages(count, options.shape, options.classes, seed)
        for seed, count in enumerate((options.samples, options.test_samples))
    )
    return Data(train, test, options.classes)


def make_characters(options: CharacterData) -> Data:
    """Return the characters of a text, in one part to train on and one to test on."""
    train, test = (CharacterText(options.path, options.sequence_length, train=part) for part in (True, False))
    return Data(train, test, len(train.vocabulary))


def make_table(options: TableData) -> Data:
    """Return rows of random numbers, the same to train on and to test on."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(options.samples, options.inputs, generator=generator, device="cpu")
    y = torch.randn(options.samples, options.outputs, generator=generator, device="cpu")
    return Data(TensorDataset(x, y), TensorDataset(x, y), 0)
