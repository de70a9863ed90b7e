"""Random images are the same for the same seed, and say that nothing can be learnt from them."""

import pytest
import torch

from shardwright.data.images import RandomDataWarning, RandomImages
from shardwright.errors import UsageError


def test_the_seed_decides_and_what_they_are_good_for_is_said():
    with pytest.warns(RandomDataWarning, match="accuracy on others than these will be about one half"):
        x, y = RandomImages().gather(range(5000))
    assert (x.shape, x.dtype, y.dtype) == ((5000, 3, 32, 32), torch.float32, torch.int64)
    assert (x.min(), x.max(), set(y.tolist())) == (0, 1, {0, 1})
    assert abs(x.mean() - 0.5) < 1e-3
    with pytest.warns(RandomDataWarning, match="about 1/10"):
        a, b, c = (RandomImages(7, (1, 5, 3), 10, seed=seed).gather(range(7)) for seed in (0, 0, 1))
    assert torch.equal(a[0], b[0])
    assert torch.equal(a[1], b[1])
    assert not torch.equal(a[0], c[0])


@pytest.mark.parametrize("arguments", [{"count": 0}, {"classes": 0}, {"classes": 300}, {"shape": (3, 4)}])
def test_sizes_that_do_not_fit(arguments):
    with pytest.raises(UsageError, match="expected count of at least 1, 1 to 256 classes and a shape of three sizes"):
        RandomImages(**arguments)
