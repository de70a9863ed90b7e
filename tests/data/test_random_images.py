"""Random images are noise, the same for the same seed, and say that nothing can be learnt from them."""

import pytest
import torch

from shardwright.data.images import RandomDataWarning, RandomImages
from shardwright.errors import UsageError


def make(*arguments, **keywords):
    with pytest.warns(RandomDataWarning, match="accuracy .* will be about"):
        return RandomImages(*arguments, **keywords)


def test_the_tutorials_images():
    with pytest.warns(RandomDataWarning, match="accuracy on others than these will be about one half"):
        data = RandomImages()
    assert len(data) == 5000
    x, y = data.gather(range(5000))
    assert (x.shape, x.dtype, y.dtype) == ((5000, 3, 32, 32), torch.float32, torch.int64)
    assert (x.min(), x.max()) == (0, 1)
    assert abs(x.mean() - 0.5) < 1e-3
    assert set(y.tolist()) == {0, 1}
    assert 2300 < y.sum() < 2700


def test_the_seed_decides():
    a, b, c = make(7, (1, 5, 3), 10), make(7, (1, 5, 3), 10), make(7, (1, 5, 3), 10, seed=1)
    for index in range(7):
        assert torch.equal(a[index][0], b[index][0])
        assert not torch.equal(a[index][0], c[index][0])
    assert torch.equal(a.gather(range(7))[1], b.gather(range(7))[1])
    assert a[0][0].shape == (1, 5, 3)


def test_more_classes_mean_less_luck():
    with pytest.warns(RandomDataWarning, match="about 1/10"):
        RandomImages(10, classes=10)


@pytest.mark.parametrize("arguments", [{"count": 0}, {"classes": 0}, {"classes": 300}, {"shape": (3, 4)}])
def test_sizes_that_do_not_fit(arguments):
    with pytest.raises(UsageError, match="expected count of at least 1, 1 to 256 classes and a shape of three sizes"):
        RandomImages(**arguments)
