"""Programs of complex numbers that write to parts of tensors, as Fourier neural operators do, and that hold numbers."""

import pytest
import torch
from torch import nn

from rows import slow
from whole import like_plain

pytestmark = pytest.mark.usefixtures("float64")


def slices(weight, z):
    out = torch.zeros_like(z)
    out[:, :, 1:3] = z[:, :, :2] * weight[:, :2]
    out[:, ::2] += z[:, :2].conj()
    out[..., -1] = z[..., 0]
    return out


def rows(weight, z):
    out = torch.zeros_like(z) * weight
    out[2:] = z[:-2]
    out[0] = 3 - 1j
    return out


def real_and_imaginary_parts(weight, z):
    out = torch.zeros_like(z)
    out.real = z.imag
    out.imag[:, 1] = weight[1].real
    out[:, :, 0] = z[:, :, 0].real
    torch.view_as_real(out)[:, 2, :, 0] = z[:, 2].imag
    return out * weight


def other_views(weight, z):
    out = z.clone()
    out.diagonal(dim1=1, dim2=2).copy_(z[:, 0])
    out.transpose(1, 2)[:, 1:3] *= 2j
    out.view(-1, 16)[:, 3:7] = z.reshape(-1, 16)[:, :4]
    out[:, torch.tensor([0, 2])] = z[:, :2]
    return out * weight


def spectral_convolution(weight, z):
    modes, out = torch.fft.fft2(z), torch.zeros_like(z)
    out[:, :2, :3] = torch.einsum("bij,jk->bik", modes[:, :2], weight[:, :3])
    out[:, -2:, :3] = modes[:, -2:, :3]
    return torch.fft.ifft2(out)


def numbers(weight, z):
    return (z * 2j + (1 - 3j)).masked_fill(z.real > 0, 1j) * weight


class Net(nn.Module):
    def __init__(self, write):
        super().__init__()
        self.write = write
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex128))

    def forward(self, x):
        return self.write(self.weight, torch.complex(x, x.roll(1, 1)) * self.weight)


def loss_fn(model, batch):
    return model(batch).abs().square().mean()


@pytest.mark.parametrize(
    "write", [slices, *slow(rows, other_views), real_and_imaginary_parts, spectral_convolution, numbers]
)
def test_any_plan_gives_what_plain_pytorch_gives(write):
    torch.manual_seed(0)
    like_plain(Net(write), loss_fn, torch.randn(8, 4, 4), (3,))
