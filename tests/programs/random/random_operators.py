"""Operators that random programs are made of, as templates of lines of Python.

A hole in braces is filled with the name of a value: ``{t1}`` any tensor of floats, ``{v1}`` one with one dim,
``{m1}`` with two, ``{s1}`` with three, ``{y1}`` labels, ``{n1}`` a Python number, ``{l1}`` a list of tensors. ``{C}``
is the second size of the first tensor, ``{D}`` its last one, ``{S}`` the last one of ``{s1}``; ``{M:…}`` is a module
that the model is given, ``{o}`` and ``{p}`` are new names. A template without a new name is the right side of ``{o} =
…``, or a statement where it writes in place.
"""

ELEMENTWISE = r"""
torch.tanh({t1})
{t1}.sigmoid()
F.softplus({t1})
F.gelu({t1})
F.silu({t1})
F.leaky_relu({t1}, 0.2)
{t1}.relu()
{t1}.sin() * 0.5
({t1}.abs() + 0.1).sqrt()
({t1}.square() + 1).log()
{t1}.clamp(-1.5, 1.5)
{t1} + {t2}
{t1} * {t2}
{t1} - 0.3 * {t2}
{t1} / ({t2}.square() + 1)
torch.maximum({t1}, {t2})
torch.where({t1} > 0, {t1}, {t2})
torch.lerp({t1}, {t2}, 0.3)
torch.addcmul({t1}, {t2}, {t3}, value=0.5)
torch.hypot({t1}, {t2} + 2)
{t1}.masked_fill({t1} > 0.5, 0.0)
{t1}.pow(2) * 0.3
{t1} ** 3 * 0.1
torch.exp(-{t1}.square())
torch.atan2({t1}, {t2}.abs() + 1)
{t1}.neg().exp().clamp(max=5.0)
torch.logaddexp({t1}, {t2})
{t1}.nan_to_num() + torch.zeros_like({t1})
{t1} * torch.ones({t1}.shape[-1])
{t1} + torch.arange({t1}.shape[-1]) * 0.1
F.glu(torch.cat([{t1}, {t1}], -1), -1)
torch.nn.functional.elu({t1}) + F.hardswish({t2})
torch.special.xlogy({t1}, {t2}.square() + 0.5)
"""

PRODUCTS = r"""
{m1} @ {m2}
{m1} @ {m2}.T
{m1}.T @ {m2}
torch.matmul({t1}, {t2})
torch.mm({m1}, {m2}) * 0.5
torch.bmm({s1}, {s2}.transpose(1, 2))
torch.baddbmm({s1} @ {s2}.transpose(1, 2), {s1}, {s2}.transpose(1, 2), beta=0.5)
torch.addmm({t1}, {m1}, {m2})
torch.tensordot({t1}, {t2}, ([-1], [-1]))
torch.tensordot({m1}, {m2}, ([0], [0]))
torch.tensordot({m1}, {m2}, 1)
torch.einsum("ij,kj->ik", {m1}, {m2})
torch.einsum("ij,ij->i", {m1}, {m2})
torch.einsum("bi,bj->bij", {m1}, {m2})
torch.einsum("bti,ij->btj", {s1}, {m1})
torch.einsum("bti,bsi->bts", {s1}, {s2})
torch.einsum("ij,jk,kl->il", {m1}, {m2}, {m3}) * 0.3
torch.outer({v1}, {v2})
torch.dot({v1}, {v2})
torch.mv({m1}, {v1})
torch.inner({t1}, {t2})
torch.kron({m1}, {v1}.unsqueeze(0))
torch.chain_matmul({m1}, {m2}) if False else torch.linalg.multi_dot([{m1}, {m2}.T, {m2}])
F.linear({t1}, {m1})
F.linear({t1}, {m1}, {v1})
F.bilinear({m1}, {m2}, {s1})
{M:nn.Bilinear({D}, {D}, 3)}({t1}, {t2})
{M:nn.Linear({D}, 4)}({t1})
{M:nn.Linear({D}, 4, bias=False)}({t1})
{M:nn.Linear({D}, 6)}({t1})
F.cosine_similarity({t1}, {t2}, dim=-1)
F.cosine_similarity({m1}.unsqueeze(1), {m2}.unsqueeze(0), dim=-1)
torch.cdist({m1}, {m2})
torch.cdist({m1}, {m2}, p=1.0)
F.pairwise_distance({m1}, {m2})
torch.cross({t1}[..., :3], {t2}[..., :3], dim=-1)
F.scaled_dot_product_attention({s1}, {s2}, {s2})
F.scaled_dot_product_attention({s1}, {s1}, {s1}, is_causal=True)
{M:nn.MultiheadAttention({D}, 2, batch_first=True)}({s1}, {s2}, {s2})[0]
{M:nn.Conv1d(3, 3, 2, padding=1)}({s1})
{M:nn.Conv1d({C}, 2, 3, padding=1)}({s1})
{M:nn.Conv2d(1, 2, 2)}({s1}.unsqueeze(1))
F.avg_pool1d({s1}, 2)
F.max_pool1d({s1}, 2, 1)
{M:nn.EmbeddingBag(4, 4)}({y1}.unsqueeze(1))
{M:nn.Embedding(4, 4)}({y1})
F.embedding({y1}, {m1}[:4])
"""

CELLS = r"""
{M:nn.RNNCell({D}, 4)}({m1})
{M:nn.RNNCell({D}, 4)}({m1}, {m2})
{M:nn.GRUCell({D}, 4)}({m1})
{M:nn.GRUCell({D}, 4)}({m1}, {m2})
{o}, {p} = {M:nn.LSTMCell({D}, 4)}({m1})
{o}, {p} = {M:nn.LSTMCell({D}, 4)}({m1}, ({m2}, {m3}))
{o}, _ = {M:nn.GRU({D}, 4, batch_first=True)}({s1})
{o}, ({p}, _) = {M:nn.LSTM({D}, 4, batch_first=True)}({s1})
{o} = {m1}\nfor i in range({s1}.shape[1]):\n    {o} = {M:nn.GRUCell({S}, 4)}({s1}[:, i], {o})
"""

NORMS = r"""
{M:nn.LayerNorm({D})}({t1})
F.layer_norm({t1}, {t1}.shape[-1:])
{M:nn.RMSNorm({D})}({t1})
{M:nn.BatchNorm1d({C})}({t1})
{M:nn.BatchNorm1d({C}, track_running_stats=False)}({t1})
{M:nn.BatchNorm1d({C}, affine=False)}({t1})
{M:nn.GroupNorm(1, {C})}({t1})
{M:nn.GroupNorm({C}, {C})}({t1})
{M:nn.InstanceNorm1d({C})}({s1})
F.normalize({t1}, dim=-1)
F.normalize({t1}, dim=0)
F.batch_norm({m1}, None, None, {v1}, None, training=True)
{t1} / ({t1}.norm(dim=-1, keepdim=True) + 0.1)
F.local_response_norm({s1}, 2)
"""

OVER_THE_BATCH = r"""
{t1}.softmax(0)
{t1}.log_softmax(0) * 0.3
{t1}.softmax(-1)
{t1}.log_softmax(-1)
{t1}.cumsum(0)
{t1}.cumsum(-1)
{t1}.cumprod(0) * 0.3
torch.logcumsumexp({t1}, 0)
{t1}.cummax(0).values
{t1} - {t1}.mean(0)
{t1} - {t1}.mean(-1, keepdim=True)
({t1} - {t1}.mean(0)) / ({t1}.std(0, unbiased=False) + 0.1)
{t1}.sort(0).values
{t1}.sort(-1, descending=True)[0]
{t1}[{t1}.argsort(0)[:, 0]] if {t1}.dim() > 1 else {t1}.sort()[0]
{t1}.flip(0)
{t1}.roll(1, 0)
{t1}.roll(1, -1)
torch.cat([{t1}, {t2}])
torch.cat([{t1}, {t2}], -1)
torch.stack([{t1}, {t2}])
torch.stack([{t1}, {t2}], -1)
F.normalize({m1}, dim=1) @ F.normalize({m1}, dim=1).T
{m1} @ {m1}.T
{t1}.logsumexp(0)
{t1}.logsumexp(-1)
{t1}.sum(0)
{t1}.sum(-1)
{t1}.mean(0)
{t1}.mean(-1)
{t1}.mean()
{t1}.sum()
{t1}.var(0)
{t1}.var(-1, unbiased=False)
{t1}.std(-1, keepdim=True)
{t1}.amax(0)
{t1}.amax(-1)
{t1}.max(-1).values
{t1}.min(0)[0]
{t1}.max()
{t1}.median(-1).values
{t1}.norm()
{t1}.norm(dim=0)
torch.linalg.vector_norm({t1}, dim=-1)
{t1}.prod(-1)
{t1}.topk(2, -1).values
{t1}.topk(1, 0)[0]
{t1}.kthvalue(1, -1).values
{t1}.diff(dim=0)
{t1}.diff(dim=-1)
{t1}[{y1}]
{t1}.index_select(0, {y1})
{m1}.gather(1, {y1}.unsqueeze(1))
torch.zeros(4, {m1}.shape[1]).index_add(0, {y1}, {m1})
torch.zeros_like({m1}).scatter_add(0, {y1}.unsqueeze(1).expand_as({m1}) % {m1}.shape[0], {m1})
F.one_hot({y1}, 4) * {m1}
torch.cov({m1}.T)
torch.corrcoef({m1}.T + torch.eye({m1}.shape[1], {m1}.shape[0]))
torch.triu({m1})
torch.trace({m1})
{t1} * torch.triu(torch.ones({t1}.shape[-1], {t1}.shape[-1]))[0]
"""

VIEWS = r"""
{t1}.transpose(0, -1)
{m1}.T
{m1}.t().contiguous()
{t1}.flatten()
{t1}.flatten(1)
{t1}.flatten(0, 1)
{t1}.reshape(-1, 4)
{t1}.reshape(-1, 2)
{t1}.view(-1)
{t1}.view({t1}.shape[0], -1, 2)
{t1}.unflatten(-1, (2, -1))
{t1}.unsqueeze(0)
{t1}.unsqueeze(-1)
{t1}.unsqueeze(1).squeeze(1)
{t1}.squeeze()
{t1}.unsqueeze(1).expand(-1, 2, *{t1}.shape[1:])
{t1}.repeat(2, *[1] * ({t1}.dim() - 1))
{t1}.repeat_interleave(2, 0)
{t1}[0]
{t1}[-1]
{t1}[1:]
{t1}[:2]
{t1}[:-1]
{t1}[::2]
{t1}[:, 0]
{t1}[:, 1:]
{t1}[..., :2]
{t1}[..., 0]
{t1}[..., None]
{t1}.chunk(2, -1)[0]
{t1}.chunk(2)[0]
{t1}.split(2)[-1]
{t1}.split([1, {t1}.shape[-1] - 1], -1)[1]
{t1}.unbind(-1)[0]
{t1}.unbind()[0]
{t1}.narrow(-1, 0, 2)
{t1}.select(0, 0)
{t1}.movedim(0, -1)
{t1}.permute(*reversed(range({t1}.dim())))
{t1}.unfold(-1, 2, 1)
{m1}.diagonal()
torch.diag_embed({v1})
torch.diag({v1})
{t1}.expand_as({t1} + {t2})
{t1}.clone()
{t1}.contiguous()
{t1}.view_as({t1})
{t1}.to({t1}.dtype)
{t1}.float().to({t1}.dtype)
F.pad({t1}, (1, 0))
F.pad({t1}, (0, -1))
{o}, {p} = {t1}.split([1, {t1}.shape[-1] - 1], -1)
{o}, {p} = {t1}[..., :2], {t1}[..., 2:]
{o}, {p} = {t1}.tensor_split(2)
"""

DETACHED = r"""
{t1}.detach()
{t1}.detach().clone()
{t1}.detach() * {t2}
{t1} - ({t1} - {t2}).detach()
{t1}.clone().detach().requires_grad_(False)
F.mse_loss({t1}, {t1}.detach() * 0.5)
({t1} > {t2}).to({t1}.dtype)
{t1}.sign() * {t2}
{t1}.round().detach() + {t1}
"""

IN_PLACE = r"""
{t1}.mul_(0.5)
{t1}.add_({t2})
{t1}.sub_({t2}, alpha=0.5)
{t1}.mul_({t2})
{t1}.copy_({t2})
{t1}.zero_()
{t1}.fill_(0.25)
{t1}.clamp_(-1, 1)
{t1}.tanh_()
{t1}.relu_()
F.leaky_relu_({t1}, 0.1)
{t1} += {t2}
{t1} *= 0.5
{t1}[0] = {t2}
{t1}[0] = 0.5
{t1}[-1] += 1.0
{t1}[:, 0] = {t2}
{t1}[:, 0] = 0.0
{t1}[1:] = {t2}
{t1}[1:] = {t1}[:-1].clone()
{t1}[..., 0] *= 2.0
{t1}[..., :2] = {t2}
{t1}[..., 1:].add_(0.5)
{t1}.transpose(0, -1).mul_(0.7)
{t1}.view(-1)[0] = 1.0
{t1}[{t1} > 1] = 0.0
{t1}.masked_fill_({t1} > 1, 0.5)
{t1}.index_fill_(0, {y1}, 0.1)
{t1}.index_add_(0, {y1} % {t1}.shape[0], {t2})
{t1}.lerp_({t2}, 0.2)
{t1}.addcmul_({t2}, {t3}, value=0.1)
{m1}.fill_diagonal_(0.0)
{m1}.diagonal().add_(1.0)
{t1}.unbind()[0].mul_(2.0)
{t1}.chunk(2, -1)[1].mul_(0.5)
self.r.mul_(0.9).add_({v1}.detach(), alpha=0.1)
self.r.copy_({t1}.detach().reshape(-1, 4).mean(0))
self.r.lerp_({t1}.detach().reshape(-1, 4).sum(0), 0.1)
self.r.add_(1)
self.r = 0.9 * self.r + 0.1 * {t1}.detach().reshape(-1, 4).mean(0)
{o} = torch.zeros_like({t1})\n{o}[0] = {t1}[0]\n{o}[1:] = {t1}[1:] * 2
{o} = {t1}.new_zeros({t1}.shape)\n{o}.copy_({t1})\n{o}[..., 0] += {t1}[..., 0]
{o} = torch.empty_like({t1})\nfor i in range({t1}.shape[-1]):\n    {o}[..., i] = {t1}[..., i] * (i + 1)
{o} = {t1}.clone()\n{o}[{o} < 0] = -0.1
"""

NUMBERS = r"""
{o} = {t1}.shape[0]
{o} = len({t1})
{o} = 1.0 / ({t1}.size(-1) + 1)
{o} = {t1}.numel() / 16
{o} = math.sqrt({t1}.shape[-1])
{o} = {t1}.dim() + {n1}
{o} = float({t1}.requires_grad) + 0.5
{t1} * {n1}
{t1} / ({n1} + 1)
{t1}.add({t2}, alpha={n1})
{t1} + torch.tensor({n1})
{t1} * torch.full(({t1}.shape[-1],), float({n1}))
{o} = [{t1}, {t2}]
{o} = [{t1}, {t1}]
{o} = list({t1}.unbind(-1))
{o} = [{t1} * (i + 1) for i in range(3)]
{o} = [*{l1}, {t1}]
torch.stack({l1})
torch.stack({l1}, -1)
torch.cat({l1}, -1)
sum({l1})
{l1}[-1] * {l1}[0]
{o} = 0.0\nfor each in {l1}:\n    {o} = {o} + each.square().mean()
{o} = {t1}\nfor i in range(3):\n    {o} = torch.tanh({o} + 0.1 * i * {t1})
"""


def templates(text: str) -> list[str]:
    """Return the templates that stand in a text line by line."""
    return [line.replace("\\n", "\n") for line in text.splitlines() if line]


KINDS = {
    "elementwise": templates(ELEMENTWISE),
    "products": templates(PRODUCTS),
    "cells": templates(CELLS),
    "norms": templates(NORMS),
    "over the batch": templates(OVER_THE_BATCH),
    "views": templates(VIEWS),
    "detached": templates(DETACHED),
    "in place": templates(IN_PLACE),
    "numbers": templates(NUMBERS),
}
