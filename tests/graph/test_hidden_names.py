"""Tensors that composite operators give once more, without saying so, and changes in place of them."""

import pytest
import torch
from torch import nn

from shardwright.errors import CaptureError
from shardwright.graph.functional.program import functional


class Keeps(nn.Module):
    """Changes what it keeps by one name and reads it by another."""

    def __init__(self, step):
        super().__init__()
        self.register_buffer("kept", torch.arange(9.0).view(3, 3))
        self.step = step

    def forward(self, x):
        return self.step(self.kept, x)


def read_later(kept, x):
    other = torch.einsum("ij->ji", kept)
    kept.mul_(2)
    return x @ other


def changed_by_another_name(kept, x):
    torch.einsum("ij->ji", kept).mul_(2)
    return x @ kept


def never_read_again(kept, x):
    return torch.einsum("ij->ji", x + 1).mul_(2) @ kept


def of_a_copy(kept, x):
    other = torch.einsum("ij->ji", kept).clone()
    kept.mul_(2)
    return x @ other


def exported(step):
    return torch.export.export(Keeps(step), (torch.randn(3, 3),), strict=False)


@pytest.mark.parametrize("step", [read_later, changed_by_another_name])
def test_a_change_of_what_an_operator_gave_without_a_copy_is_refused(step):
    with pytest.raises(CaptureError, match=r"aten.mul_.* is another name, since aten.einsum.* write .clone\(\) behind"):
        functional(exported(step))


@pytest.mark.parametrize("step", [never_read_again, of_a_copy])
def test_a_change_that_nothing_sees_is_not(step):
    functional(exported(step))
