"""Random images are noise, the same for the same seed, and say that nothing can be learnt from them."""

import pytest
import torch

from shardwright.data.images import RandomDataWarning, RandomImages


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
