"""The data that a configuration names, and what a model must know about them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import TensorDataset

from shardwright.data import cifar, mnist
from shardwright.data.cifar import CIFAR10
from shardwright.data.mnist import MNIST
from shardwright.data.random_images import RandomImages
from shardwright.data.text import CharacterText
from shardwright.data.transforms import Compose, Normalise, RandomCrop, RandomHorizontalFlip, Transform
from shardwright.zoo.options import CharacterData, Cifar10Data, DataOptions, MnistData, RandomData, TableData

# Mean and deviation of the training images, by channel.
_MNIST_MOMENTS = ((0.1307,), (0.3081,))
_CIFAR10_MOMENTS = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))


@dataclass(frozen=True)
class Data:
    """What is trained on and what is tested on. ``classes`` is 0 where the targets are numbers."""

    train: Any
    test: Any
    classes: int

    @property
    def sample_shape(self) -> torch.Size:
        """The shape of one sample, without a batch dim."""
        shape: torch.Size = self.train[0][0].shape
        return shape

    @property
    def sample_dtype(self) -> torch.dtype:
        """Of the samples."""
        dtype: torch.dtype = self.train[0][0].dtype
        return dtype

    @property
    def target_shape(self) -> torch.Size:
        """The shape of one target."""
        shape: torch.Size = self.train[0][1].shape
        return shape


def make_data(options: DataOptions) -> Data:
    """Read or draw the data.

    Raises:
        DataError, UsageError: where files are missing, corrupt or too short.
    """
    make: Callable[[Any], Data] = _MAKERS[type(options)]
    return make(options)


def _mnist(options: MnistData) -> Data:
    train, test = (MNIST(options.root, train=part, transform=Normalise(*_MNIST_MOMENTS)) for part in (True, False))
    return Data(train, test, mnist.CLASSES)


def _cifar10(options: Cifar10Data) -> Data:
    normalise = Normalise(*_CIFAR10_MOMENTS)
    random: list[Transform] = [RandomCrop(cifar.SIDE, options.crop)] if options.crop else []
    random += [RandomHorizontalFlip()] if options.flip else []
    train = CIFAR10(options.root, train=True, transform=Compose([*random, normalise]))
    return Data(train, CIFAR10(options.root, train=False, transform=normalise), cifar.CLASSES)


def _random(options: RandomData) -> Data:
    train, test = (
        RandomImages(count, options.shape, options.classes, seed)
        for seed, count in enumerate((options.samples, options.test_samples))
    )
    return Data(train, test, options.classes)


def _characters(options: CharacterData) -> Data:
    train, test = (CharacterText(options.path, options.sequence_length, train=part) for part in (True, False))
    return Data(train, test, len(train.vocabulary))


def _table(options: TableData) -> Data:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(options.samples, options.inputs, generator=generator)
    y = torch.randn(options.samples, options.outputs, generator=generator)
    return Data(TensorDataset(x, y), TensorDataset(x, y), 0)


_MAKERS: dict[type, Callable[[Any], Data]] = {
    MnistData: _mnist,
    Cifar10Data: _cifar10,
    RandomData: _random,
    CharacterData: _characters,
    TableData: _table,
}
