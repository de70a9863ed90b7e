"""A captured graph, run as it is, beside the model that it was captured from."""

import torch

from device import placed
from shardwright.compiler.capture.capture import capture, flatten_batch
from shardwright.compiler.capture.check import check
from shardwright.compiler.capture.evaluate import evaluate


def assert_equals_eager(captured, model, loss_fn, batch, *, tolerance=1e-12):
    """Loss, auxiliary output, gradients and new buffers; also that the graph's facts about its values are true."""
    check(captured)
    model, batch = placed(model), placed(batch)
    parameters = dict(model.named_parameters())
    buffers = {name: tensor.clone() for name, tensor in model.named_buffers()}
    torch.manual_seed(3)
    values = evaluate(captured, parameters, buffers, flatten_batch(batch))
    for name, value in captured.values.items():
        if name in values:
            found = values[name]
            assert (tuple(found.shape), found.dtype) == (value.shape, value.dtype), value
            if value.kind == "result":
                assert found.requires_grad == value.needs_gradient, value
    wanted = [p for p in parameters.values() if p.requires_grad]
    gradients = torch.autograd.grad(values[captured.loss], wanted, allow_unused=True)
    torch.manual_seed(3)
    output = loss_fn(model, batch)
    loss = output[0] if isinstance(output, tuple) else output
    expected = torch.autograd.grad(loss, wanted, allow_unused=True)

    def same(a, b, what):
        assert (a is None) == (b is None), what
        if a is not None:
            torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance, msg=lambda m: f"{what}: {m}")

    same(values[captured.loss], loss, "loss")
    for (name, _), got, want in zip(
        ((n, p) for n, p in parameters.items() if p.requires_grad), gradients, expected, strict=True
    ):
        same(got, want, name)
    changed = dict(model.named_buffers())
    mutated = {captured.values[b].label: values[v] for b, v in captured.mutations.items()}
    for name, before in buffers.items():
        same(mutated.get(name, before), changed[name], name)
        if name not in mutated:
            assert torch.equal(before, changed[name]), f"{name} changed, and the graph does not say so"
    if captured.aux_spec is not None:
        aux = captured.aux_spec.unflatten([values[name] for name in captured.aux])
        torch.testing.assert_close(aux, output[1], atol=tolerance, rtol=tolerance)
    return captured


def captured_and_checked(model, loss_fn, batch, **options):
    return assert_equals_eager(capture(model, loss_fn, batch, **options), model, loss_fn, batch)
