"""Transforms do what they say, and what is random in them belongs to (seed, epoch, sample index) alone."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import shardwright as sw
from shardwright.data.images import LabelledImages
from shardwright.data.transforms import Compose, Keys, Normalise, RandomCrop, RandomHorizontalFlip
from shardwright.errors import UsageError

AUGMENT = Compose([RandomCrop(12, padding=2), RandomHorizontalFlip(), Normalise([0.5], [0.25])])


def images(count, side=12):
    """Every pixel differs from every other."""
    return torch.arange(count * 3 * side * side).reshape(count, 3, side, side).float()


def keys(count, **arguments):
    return Keys.of(range(count), **arguments)


def dataset():
    pixels = np.random.default_rng(0).integers(0, 256, (40, 3, 12, 12), dtype=np.uint8)
    return LabelledImages(pixels, np.arange(40, dtype=np.uint8), transform=AUGMENT)


def seen(data, ranks, epoch=0, batch_size=9, workers=0, seed=3):
    """label -> image, from all ranks of a world."""
    found = {}
    for rank in range(ranks):
        loader = sw.loader(
            data, batch_size, world=SimpleNamespace(rank=rank, size=ranks), seed=seed, num_workers=workers
        )
        loader.set_epoch(epoch)
        for x, y in loader:
            found |= {int(label): image for label, image in zip(y, x, strict=True)}
    assert sorted(found) == list(range(40))
    return torch.stack([found[label] for label in range(40)])


def test_any_number_of_ranks_and_workers_sees_the_same_images():
    data = dataset()
    wanted = seen(data, 1)
    for ranks, batch_size, workers in ((2, 9, 0), (3, 16, 2), (1, 1, 0)):
        assert torch.equal(seen(data, ranks, batch_size=batch_size, workers=workers), wanted)


def test_another_epoch_and_another_seed_see_other_images():
    found = [seen(dataset(), 1, epoch=epoch, seed=seed) for epoch, seed in ((0, 3), (1, 3), (0, 4))]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        same = (found[one] == found[other]).flatten(1).all(dim=1)
        assert same.sum() < 5  # of 40: there are 50 ways to crop and to flip one


def test_the_sample_batch_is_the_first_batch():
    loader = sw.loader(dataset(), 9, seed=3)
    loader.set_epoch(2)
    sample = loader.sample_batch()
    assert torch.equal(sample[0], next(iter(loader))[0])


def test_single_samples_are_those_of_the_first_epoch():
    data = dataset()
    batch = data.gather(range(40), seed=0, epoch=0)[0]
    for index in (0, 17, 39):
        assert torch.equal(data[index][0], batch[index])


def test_uniform_numbers_are_uniform_and_independent():
    numbers = torch.stack(
        [keys(5000, seed=s, epoch=e).split(n).uniform() for s in (0, 1) for e in (0, 1) for n in (0, 1)]
    )
    assert (numbers >= 0).all()
    assert (numbers < 1).all()
    assert (abs(numbers.mean(dim=1) - 0.5) < 5 * (1 / 12 / 5000) ** 0.5).all()
    assert (abs(torch.corrcoef(numbers) - torch.eye(8)) < 5 / 5000**0.5).all()
    assert abs(torch.corrcoef(torch.stack([numbers[0, 1:], numbers[0, :-1]]))[0, 1]) < 5 / 5000**0.5
    counts = torch.bincount(keys(6000).integers(6))
    assert len(counts) == 6
    assert (abs(counts - 1000) < 150).all()


def test_the_numbers_are_the_same_for_ever():
    assert keys(3, seed=2, epoch=1).split(4).uniform().tolist() == pytest.approx(
        [0.0841896254, 0.4992206639, 0.9283708456], abs=1e-9
    )


def test_chains_of_chains_draw_numbers_of_their_own():
    streams = {k.stream for a in range(4) for b in range(4) for k in (keys(1).split(a), keys(1).split(a).split(b))}
    assert len(streams) == 20


def test_a_crop_is_a_window_of_the_padded_image():
    x = images(64, side=8)
    cropped = RandomCrop(8, padding=2)(x, keys(64))
    assert cropped.shape == x.shape
    windows = F.pad(x, [2] * 4).unfold(2, 8, 1).unfold(3, 8, 1)  # n, c, top, left, 8, 8
    places = set()
    for image, choice in zip(cropped, windows, strict=True):
        matches = [(a, b) for a in range(5) for b in range(5) if torch.equal(image, choice[:, a, b])]
        assert len(matches) == 1
        places.add(matches[0])
    assert len(places) > 20  # of 25


def test_about_half_of_the_images_are_flipped():
    x = images(400, side=4)
    flipped = RandomHorizontalFlip()(x, keys(400))
    turned = (flipped == x.flip(-1)).flatten(1).all(1)
    kept = (flipped == x).flatten(1).all(1)
    assert (turned ^ kept).all()
    assert 150 < turned.sum() < 250
    assert torch.equal(RandomHorizontalFlip(1.0)(x, keys(400)), x.flip(-1))
    assert torch.equal(RandomHorizontalFlip(0.0)(x, keys(400)), x)


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (RandomCrop(9), r"RandomCrop\(9, padding=0\) does not fit into images of 8 x 8"),
        (Normalise([1.0, 2.0], [1.0]), "Normalise has 2 numbers as its mean, the images have 3 channels"),
        (Normalise([1.0], [1.0, 2.0]), "Normalise has 2 numbers as its deviation"),
    ],
)
def test_what_does_not_fit(transform, message):
    with pytest.raises(UsageError, match=message):
        transform(torch.zeros(1, 3, 8, 8), keys(1))


def test_other_callables_in_a_chain():
    with pytest.raises(UsageError, match=r"expected transforms of .*, got <built-in .*; a data set takes"):
        Compose([torch.relu])


def test_normalised_images():
    two = torch.rand(2, 3, 4, 4)
    wanted = torch.stack([(two[:, c] - m) / d for c, m, d in ((0, 0.1, 1.0), (1, 0.2, 2.0), (2, 0.3, 4.0))], dim=1)
    torch.testing.assert_close(Normalise([0.1, 0.2, 0.3], [1.0, 2.0, 4.0])(two, keys(2)), wanted)
