"""Gradients of a bucket are joined in a flat tensor and read there in their shapes."""

import pytest
import torch

from shardwright.runtime.programs.buckets import GradientReduction


class Doubling:
    """Ranks that hold the same as this one."""

    def all_reduce(self, tensor, axes):
        assert tensor.ndim == 1
        return tensor.mul_(2)


@pytest.mark.parametrize("shapes", [[(3, 2)], [(3, 2), (0, 4), ()], [(2, 3, 4, 5), (1,)]], ids=str)
def test_gradients_are_summed_together_and_have_their_shapes(shapes):
    tensors = [torch.randn(shape) for shape in shapes]
    tensors = [x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x for x in tensors]
    before = [x.clone() for x in tensors]
    keys = [str(i) for i in range(len(shapes))]
    found = GradientReduction().reduce(keys, tensors, tensors, Doubling(), ("d",), None, None)
    assert [sum.shape for sum in found] == [x.shape for x in tensors]
    assert all(torch.equal(sum, 2 * x) for sum, x in zip(found, tensors, strict=True))
    assert all(map(torch.equal, tensors, before)), "others may read the gradients too"
