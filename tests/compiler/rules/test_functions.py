"""Functions with a backward of their own have names that lead back to them."""

import pytest
import torch

from shardwright.compiler.rules.register import function_of, is_function, name_of
from shardwright.compiler.rules.table import key_of
from shardwright.errors import CaptureError


class Outer:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2


def test_a_name_leads_back_to_the_class():
    op = name_of(Outer.Twice)
    assert op == f"autograd.{__name__.replace('.', '/')}:Outer/Twice.apply"
    assert is_function(op)
    assert op.count(".") == 2
    assert key_of(op) is None
    assert function_of(op) is Outer.Twice


@pytest.mark.parametrize("op", ["autograd.nowhere:Clip.apply", f"autograd.{__name__}:Outer.apply"])
def test_a_name_of_nothing_is_refused(op):
    with pytest.raises(CaptureError, match="of the name"):
        function_of(op)
