"""Naive twins of every op: plain torch, written to be read, with torch's own autograd. They judge the fast paths.

Same names and arguments as the public ops, less `backend`, `debug` and memory budgets; no argument checks. fp64
inputs stay fp64, everything else is computed in fp32. Slow where that is clearer: `gae` is two Python loops.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastrlhf_kernels.gae import AdvantagesAndReturns
from fastrlhf_kernels.logprobs import LogprobsAndEntropy
from fastrlhf_kernels.ppo_loss import PPOLoss, PPOStats
from fastrlhf_kernels.rewards import ShapedRewards


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def token_logprobs(
    logits: Tensor,
    ids: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    ignore_index: int = -100,
    return_entropy: bool = False,
) -> Tensor | LogprobsAndEntropy:
    ignored = ids == ignore_index
    inside = (ids >= 0) & (ids < logits.shape[-1])
    if isinstance(temperature, Tensor) and temperature.dim() > 0:
        temperature = torch.where(ignored, 1.0, temperature)[..., None]
    # Twice: 0 in the result, and no gradient 0 / NaN from a temperature that is a NaN.
    kept = torch.where(ignored[..., None], 0.0, _wide(logits))
    x = torch.where(ignored[..., None], 0.0, kept / temperature)
    logp = torch.log_softmax(x, -1)
    picked = logp.gather(-1, torch.where(inside, ids, 0).long()[..., None]).squeeze(-1)
    logprobs = torch.where(ignored, 0.0, torch.where(inside, picked, math.nan))
    if not return_entropy:
        return logprobs
    p = logp.exp()
    entropy = -(p * torch.where(p > 0, logp, 0.0)).sum(-1)  # 0 log 0 = 0
    return LogprobsAndEntropy(logprobs, torch.where(ignored, 0.0, torch.where(inside, entropy, math.nan)))


def linear_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    temperature: float | Tensor = 1.0,
    ignore_index: int = -100,
    return_entropy: bool = False,
) -> Tensor | LogprobsAndEntropy:
    hidden = torch.where((ids == ignore_index)[..., None], 0.0, _wide(hidden))
    logits = hidden @ _wide(weight).t()
    if bias is not None:
        logits = logits + _wide(bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return token_logprobs(
        logits, ids, temperature=temperature, ignore_index=ignore_index, return_entropy=return_entropy
    )


def masked_whiten(values: Tensor, mask: Tensor, *, shift_mean: bool = True, eps: float = 1e-8) -> Tensor:
    kept = _wide(values)[mask]
    if kept.numel() == 0:
        return torch.zeros_like(_wide(values))
    mean, var = kept.mean(), kept.var(correction=0)
    white = (kept - mean) / torch.sqrt(var + eps)
    return torch.zeros_like(_wide(values)).masked_scatter(mask, white if shift_mean else white + mean)


def shape_rewards(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    scores: Tensor,
    last_index: Tensor,
    *,
    kl_coef: float,
    estimator: str = "k1",
) -> ShapedRewards:
    B, T = logprobs.shape
    kl_BT = torch.zeros_like(_wide(logprobs))
    rewards_BT = torch.zeros_like(kl_BT)
    for b in range(B):
        last = int(last_index[b])
        for t in range(last + 1):
            d = _wide(logprobs)[b, t] - _wide(ref_logprobs)[b, t]
            kl_BT[b, t] = {"k1": d, "k2": d**2 / 2, "k3": torch.exp(-d) - 1 + d}[estimator]
            rewards_BT[b, t] = -kl_coef * kl_BT[b, t]
        if T > 0:
            rewards_BT[b, last + 1 if last + 1 < T else last] += scores[b]
    return ShapedRewards(rewards_BT, kl_BT)


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float,
    lam: float,
    bootstrap: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> AdvantagesAndReturns:
    if cu_seqlens is not None:
        parts = []
        for s, (start, end) in enumerate(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)):
            row = (x[None, start:end] for x in (rewards, values, mask))
            parts.append(gae(*row, gamma=gamma, lam=lam, bootstrap=None if bootstrap is None else bootstrap[s, None]))
        advantages, returns = (
            torch.cat([p[i].flatten() for p in parts]) if parts else torch.zeros_like(_wide(rewards)) for i in (0, 1)
        )
        return AdvantagesAndReturns(advantages, returns)
    rewards, values = _wide(rewards.detach()), _wide(values.detach())
    advantages, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
    for b in range(rewards.shape[0]):
        next_value = rewards.new_zeros(()) if bootstrap is None else bootstrap[b].to(rewards.dtype)
        next_advantage = rewards.new_zeros(())
        for t in reversed(range(rewards.shape[1])):
            if not mask[b, t]:
                continue
            delta = rewards[b, t] + gamma * next_value - values[b, t]
            next_advantage = delta + gamma * lam * next_advantage
            next_value = values[b, t]
            advantages[b, t] = next_advantage
            returns[b, t] = next_advantage + values[b, t]
    return AdvantagesAndReturns(advantages, returns)


def gae_whiten(
    rewards: Tensor,
    values: Tensor,
    value_mask: Tensor,
    policy_mask: Tensor,
    *,
    gamma: float,
    lam: float,
    eps: float = 1e-8,
) -> AdvantagesAndReturns:
    advantages, returns = gae(rewards, values, value_mask, gamma=gamma, lam=lam)
    return AdvantagesAndReturns(masked_whiten(advantages, policy_mask, eps=eps), returns)


def ppo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    value_mask: Tensor,
    *,
    clip: float,
    value_clip: float,
    vf_coef: float,
    normalizer: float | Tensor | None = None,
    value_normalizer: float | Tensor | None = None,
    entropy: Tensor | None = None,
    entropy_coef: float = 0.0,
) -> PPOLoss:
    lp, old, adv = (_wide(x)[mask] for x in (logprobs, old_logprobs, advantages))
    v, v_old, target = (_wide(x)[value_mask] for x in (values, old_values, returns))
    n = max(len(lp), 1) if normalizer is None else normalizer
    n_value = max(len(v), 1) if value_normalizer is None else value_normalizer

    d = lp - old
    ratio = torch.exp(d)
    pg1, pg2 = -adv * ratio, -adv * torch.clamp(ratio, 1 - clip, 1 + clip)
    pg_loss_sum = torch.max(pg1, pg2).sum()

    v_clipped = torch.clamp(v, v_old - value_clip, v_old + value_clip)
    vf1, vf2 = (v - target) ** 2, (v_clipped - target) ** 2
    vf_loss_sum = 0.5 * torch.max(vf1, vf2).sum()

    pg_loss, vf_loss = pg_loss_sum / n, vf_loss_sum / n_value
    loss = pg_loss + vf_coef * vf_loss
    if entropy is not None:
        loss = loss - entropy_coef * _wide(entropy)[mask].sum() / n
    stats = PPOStats(
        n=mask.sum(),
        n_value=value_mask.sum(),
        pg_loss_sum=pg_loss_sum,
        vf_loss_sum=vf_loss_sum,
        pg_clipped=(pg2 > pg1).sum(),
        vf_clipped=(vf2 > vf1).sum(),
        ratio_sum=ratio.sum(),
        ratio_max=ratio.max() if len(ratio) else ratio.sum(),
        kl_k1_sum=(-d).sum(),
        kl_k2_sum=(0.5 * d**2).sum(),
        kl_k3_sum=(ratio - 1 - d).sum(),
    )
    return PPOLoss(loss, pg_loss, vf_loss, PPOStats(*(x.detach().to(loss.dtype) for x in stats)))
