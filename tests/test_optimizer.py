"""AdamW with fp32 masters, against torch's AdamW on an fp32 model that is fed the same gradients."""

import pytest
import torch
from torch import nn

from fastrlhf.optimizer import MasterAdamW, adamw

OPTIONS = dict(lr=3e-6, eps=1e-5, weight_decay=0.01)


def nets():
    torch.manual_seed(0)
    half = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.LayerNorm(32), nn.Linear(32, 1)).bfloat16()
    half[2].float()  # a family may keep some weights in fp32
    half[3].bias.requires_grad_(False)
    return half


def loss_of(net, x):
    hidden = net[1](net[0](x.bfloat16())).float()
    return net[3](net[2](hidden).bfloat16()).float().square().mean()


def test_steps_are_those_of_torch_on_an_fp32_copy():
    net = nets()
    trained = [p for p in net.parameters() if p.requires_grad]
    copies = [nn.Parameter(p.detach().float()) for p in trained]
    twin = torch.optim.AdamW(copies, betas=(0.9, 0.999), **OPTIONS)
    ours = adamw(net, **OPTIONS)
    assert isinstance(ours, MasterAdamW)
    for step in range(5):
        gradients = [torch.zeros_like(c) for c in copies]
        for micro in range(3):
            loss = loss_of(net, torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + micro)))
            alone = torch.autograd.grad(loss, trained, retain_graph=True)
            for total, g in zip(gradients, alone, strict=True):
                total += g.float()  # micro-batches are summed in fp32
            loss.backward()
            assert all(p.grad is None for p in trained if p.dtype == torch.bfloat16)
        for c, g in zip(copies, gradients, strict=True):
            c.grad = g
        norm = torch.nn.utils.get_total_norm([p.grad for p in ours.param_groups[0]["params"]])
        assert float(norm) == pytest.approx(float(torch.cat([g.flatten() for g in gradients]).norm()), rel=1e-6)
        twin.step()
        ours.step()
        ours.zero_grad(set_to_none=True)
        for c, m, p in zip(copies, ours.param_groups[0]["params"], trained, strict=True):
            torch.testing.assert_close(m, c, rtol=1e-6, atol=1e-9)
            assert torch.equal(p.detach(), m.detach().to(p.dtype))


def test_small_steps_are_not_rounded_away():
    def run(make):
        net = nets()
        optimizer = make(net)
        before = [p.detach().clone() for p in net.parameters()]
        x = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
        first = loss_of(net, x).item()
        for _ in range(300):
            loss_of(net, x).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        moved = sum(int((a != b).sum()) for a, b in zip(before, net.parameters(), strict=True))
        return first - loss_of(net, x).item(), moved

    plain, plain_moved = run(lambda net: torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], **OPTIONS))
    ours, moved = run(lambda net: adamw(net, **OPTIONS))
    assert ours > 2 * plain and moved > 2 * plain_moved


def test_fp32_and_fp64_models_need_no_copies():
    for dtype in (torch.float32, torch.float64):
        net = nets().to(dtype)
        optimizer = adamw(net, **OPTIONS)
        assert type(optimizer) is torch.optim.AdamW
        assert all(p.dtype == dtype for p in optimizer.param_groups[0]["params"])
