"""What tests of graphs share."""

import pytest
import torch


@pytest.fixture
def float64():
    """New tensors are in float64, and drawn as in every other such test."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)
