"""Gradients of a bucket are joined by torch's own loops, not by calls from Python for each."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

from shardwright.common.torch_private import flattened, views_into
from shardwright.runtime.programs.buckets import GradientReduction


class Alone:
    """A rank that has nobody to sum with."""

    def all_reduce(self, tensor, axes):
        return tensor


class Calls(TorchFunctionMode):
    """Counts the calls of torch from Python."""

    count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.count += "__get__" not in str(function)
        return function(*args, **(kwargs or {}))


def test_a_bucket_takes_a_few_calls_of_torch_however_many_gradients_it_has():
    counts = []
    for many in (2, 200):
        gradients = [torch.randn(3, 2) for _ in range(many)]
        with Calls() as calls:
            keys, axes = [str(i) for i in range(many)], ("d",)
            found = GradientReduction().reduce(keys, gradients, gradients, Alone(), axes, None, None)
        assert all(map(torch.equal, found, gradients))
        counts.append(calls.count / many)
    assert counts[1] <= 2, f"{counts[1]} calls for each gradient, of which its size is one"


@pytest.mark.parametrize("shapes", [[(3, 2)], [(3, 2), (0, 4), ()], [(2, 3, 4, 5), (1,)]], ids=str)
def test_gradients_are_copied_into_a_flat_tensor_and_seen_there_in_their_shapes(shapes):
    tensors = [torch.randn(shape) for shape in shapes]
    tensors = [x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x for x in tensors]
    before = [x.clone() for x in tensors]
    flat = flattened(tensors)
    views = views_into(flat, tensors)
    assert [view.shape for view in views] == [x.shape for x in tensors]
    assert all(map(torch.equal, views, tensors))
    flat.zero_()
    assert not any(view.any() for view in views)
    assert all(map(torch.equal, tensors, before)), "others may read the gradients too"
