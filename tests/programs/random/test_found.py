"""What random programs have found, each as a program of a few lines that gives what plain PyTorch gives."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from rows import slow
from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.request import PlanRequest
from shardwright.errors import CaptureError
from whole import plain, run, same, splitting_hardware

pytestmark = [
    pytest.mark.usefixtures("float64"),
    pytest.mark.filterwarnings("ignore:activation checkpointing saves no memory"),
]
REQUESTS = {
    "single": PlanRequest(Mesh(()), "single"),
    "data": PlanRequest(Mesh.of(d=3), "data"),
    "split": PlanRequest(Mesh.of(d=2), "auto", hardware=splitting_hardware()),
}


class Net(nn.Module):
    """Some parameters, and a ``forward`` that a test writes down."""

    def __init__(self, step):
        super().__init__()
        self.w, self.e = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(3, 4))
        self.cell, self.step = nn.RNNCell(4, 4), step

    def forward(self, x):
        return self.step(self, x)


def like_plain(step, rows=5):
    model, batch = Net(step), torch.randn(rows, 4)
    expected = plain(model, Net.__call__, batch)
    captured = captured_step(model, Net.__call__, batch, {})
    for request in REQUESTS.values():
        same(run(make_plan(captured, request), model, batch), expected)
    return captured


def test_a_result_that_nobody_reads_in_front_of_a_region_without_gradients():
    def step(self, x):
        h = x @ self.w
        torch.cdist(self.e, h)
        with torch.no_grad():
            goal = self.cell(h, h)
        return (h - goal).square().mean()

    assert "aten.cdist.default" not in [node.op for node in like_plain(step).nodes]


def test_writes_into_a_strided_view_have_the_gradient_of_the_others():
    def step(self, x):
        h = x @ self.w
        h.fill_diagonal_(0.0)
        transposed = (x[:, :3] @ self.e).T * 2.0  # which lies in memory as what it is the transposed of
        transposed.fill_diagonal_(0.5)
        transposed.as_strided((2, 2), (1, 8), 3).mul_(h[:2, :2])
        windows = (x.T @ h).as_strided((3, 2, 4), (4, 4, 1), 0)
        return h.square().mean() + transposed.exp().mean() + windows.cos().mean() + transposed.T[1:].sum()

    ops = [node.op for node in like_plain(step).nodes]
    assert not any("as_strided" in op for op in ops), ops


def test_a_strided_view_of_other_elements_is_refused():
    def step(self, x):
        return (x @ self.w)[:, 1:].as_strided((2, 2), (4, 1), 0).sum()

    with pytest.raises(CaptureError, match=r"(?s)as_strided .* at test_found.py:\d+ in step: .*\.contiguous\(\)"):
        like_plain(step)


def test_what_is_written_over_has_a_gradient_of_zero_and_not_none():
    def step(self, x):
        h = self.cell(x) * 2.0
        h.copy_(x @ self.w)
        g = self.e * 2
        g[:] = x[:3]
        return h.square().mean() + g.square().mean() + (self.w * x[:4]).zero_().sum()

    assert "shardwright.written_over" in [node.op for node in like_plain(step).nodes]


def test_a_view_of_a_changed_tensor_made_without_gradients_has_none():
    def step(self, x):
        h = x @ self.w
        h.mul_(2.0)
        with torch.no_grad():
            seen = h.view(h.shape[0], -1, 2)
        return seen.view(seen.shape[0], -1, 1).square().mean() + seen.square().mean() + self.cell(x).mean()

    like_plain(step)


def test_constants_are_made_inside_of_activation_checkpointing():
    def step(self, x):
        def scaled(h):
            return h * torch.tensor(0.5) + torch.tensor([1.0, 2.0, 3.0, 4.0])

        return checkpoint(scaled, x @ self.w, use_reentrant=False).square().mean()

    like_plain(step)


def test_what_is_made_of_a_changed_tensor_may_be_the_tensor_itself():
    def step(self, x):
        h = x @ self.w
        h[0] = x[1]
        return F.smooth_l1_loss(h, torch.zeros_like(h)) + torch.einsum("ij->ji", h).tanh().sum()

    like_plain(step)


def test_what_was_made_of_a_changed_tensor_is_still_refused():
    def step(self, x):
        h = x @ self.w
        turned = torch.einsum("ij->ji", h)
        h[0] = x[1]
        return turned.square().sum()

    with pytest.raises(CaptureError, match="changes a tensor in place that has another name"):
        like_plain(step)


def test_a_copy_made_without_gradients_has_none():
    def step(self, x):
        h = x @ self.w
        with torch.no_grad():
            copies = h.clone() + h.expand_as(h).cos() + torch.broadcast_tensors(h, x[:1])[1]
            seen = h.clone()
        return (h - seen).square().mean() + self.cell(seen).mean() + copies.mean() * self.e.mean()

    like_plain(step)


@pytest.mark.parametrize(
    "itself",
    [
        *slow(lambda h: h.double(), lambda h: h.to("cpu").type_as(h).contiguous()),
        lambda h: +h.real.conj().resolve_conj(),
        lambda h: torch.atleast_2d(h.flatten(0, 0)),
        lambda h: torch.broadcast_tensors(h, h[:1])[0],
    ],
    ids=["double", "to", "conj", "flatten", "broadcast_tensors"],
)
def test_what_gives_its_operand_itself_where_gradients_are_off_has_its_gradient(itself):
    def step(self, x):
        h = x @ self.w
        with torch.no_grad():
            seen, known = itself(h), itself(h).mean()
        return h.square().mean() + (seen * self.e[0]).sum() + known

    like_plain(step)


def test_the_diagonal_of_a_view_is_filled():
    def step(self, x):
        h = torch.linalg.multi_dot([x, self.e.T, self.e])
        h.fill_diagonal_(0.0)
        part = (x @ self.w)[:, 1:]
        part.fill_diagonal_(2.0)
        cube = (x[:4, None, :] * self.w)[:3, 1:, 1:].contiguous()
        cube.fill_diagonal_(0.5)
        return h.square().mean() + part.exp().mean() + cube.square().mean()

    like_plain(step)


def test_rows_and_columns_that_lie_apart_are_written_from_one_another():
    def step(self, x):
        h = x @ self.w
        h[:, 0] = h[:, 1]
        h[:, 2] += h[:, 3]
        h.add_(h)
        h[::2].add_(h[1:2])
        return h.square().mean()

    like_plain(step)


def diagonal_of_itself(self, h):
    h += h.diagonal()


def columns_beside(self, h):
    h[:, 1:] = h[:, :-1]


def product_of_itself(self, h):
    h[:4].addmm_(h[:4], h[:4])


def windows(self, h):
    h.unfold(1, 2, 1).mul_(2.0)


def strided_view_of_a_view(self, h):
    h[:, 1:].as_strided((3,), (4,), 1).mul_(2.0)


def detached_from_a_gradient(self, h):
    (h @ self.w).detach().copy_(h @ self.w)


def detached(self, h):
    h.detach().sub_(self.w[0])


def view_of_a_parameter(self, h):
    with torch.no_grad():
        self.w.diagonal().add_(1.0)


def parameter_by_data(self, h):
    self.w.data[0].mul_(2.0)


def earlier_view_of_a_parameter(self, h):
    turned = self.w.T
    with torch.no_grad():
        turned[..., 0] *= 2.0


@pytest.mark.parametrize(
    ("write", "said", "remedy"),
    [
        (diagonal_of_itself, "reads others of its elements meanwhile", r"\.clone\(\) behind what it reads"),
        (columns_beside, "reads others of its elements meanwhile", r"\.clone\(\) behind what it reads"),
        (product_of_itself, "reads others of its elements meanwhile", r"\.clone\(\) behind what it reads"),
        (
            windows,
            "one element in several places, as those of unfold and expand",
            r"\.clone\(\) in front of the change",
        ),
        (
            strided_view_of_a_view,
            "as_strided has made of another view, or another one of that",
            r"x\[rows, columns\] = values",
        ),
        (detached, "a detached tensor is changed in place by one that has a gradient", r"\.clone\(\) behind \.detach"),
        (
            detached_from_a_gradient,
            "a detached tensor is changed in place by one that has a gradient",
            r"\.clone\(\) behind \.detach",
        ),
        (view_of_a_parameter, "the parameter w is changed in place", r"after optimizer\.step\(\)"),
        (parameter_by_data, "the parameter w is changed in place", r"after optimizer\.step\(\)"),
        (earlier_view_of_a_parameter, "the parameter w is changed in place", r"after optimizer\.step\(\)"),
    ],
)
def test_a_write_that_no_graph_makes_right_is_refused(write, said, remedy):
    def step(self, x):
        h = x.clone()
        write(self, h)
        return (h @ self.w).square().mean()

    with pytest.raises(CaptureError, match=rf"(?s){said}, at \S*test_found.py:\d+ in {write.__name__}: .*\n.*{remedy}"):
        captured_step(Net(step), Net.__call__, torch.randn(5, 4), {})


def test_what_a_recurrent_layer_gives_without_gradients_may_not_be_changed_with_them():
    def step(self, x):
        with torch.no_grad():
            seen, _ = self.gru(x.unsqueeze(0))  # in a graph the transposed result of the layer, a view
        seen.sub_(x @ self.w)
        return seen.square().mean()

    model = Net(step)
    model.gru = torch.nn.GRU(4, 4, batch_first=True)
    said = r"(?s)a view made under torch.no_grad.*, at \S*test_found.py:\d+ .*Write \.clone"
    with pytest.raises(CaptureError, match=said):
        captured_step(model, Net.__call__, torch.randn(3, 4), {})


def test_what_is_made_where_gradients_are_off_has_none_and_may_be_filled():
    def step(self, x):
        h = x @ self.w
        with torch.no_grad():
            padded = F.pad(h, (1, 0))
        padded.mul_(2).copy_(padded)
        return (padded[:, 1:] * h).mean()

    like_plain(step)
