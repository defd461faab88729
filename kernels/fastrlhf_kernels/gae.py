"""gae and gae_whiten: generalised advantage estimation over a mask. No gradient, by design.

B = sequences, T = slots, N = packed slots, S = packed sequences.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastrlhf_kernels._backend import (
    check_float,
    check_integer,
    check_mask,
    check_number,
    compute_dtype,
    debug_finite,
    debug_true,
    resolve_backend,
)
from fastrlhf_kernels.whiten import whiten


class AdvantagesAndReturns(NamedTuple):
    advantages: Tensor
    returns: Tensor


def _next_valid(mask: Tensor) -> Tensor:
    """For each slot of the last dimension, the first valid slot after it, or the size if there is none."""
    T = mask.shape[-1]
    at = torch.where(mask, torch.arange(T, device=mask.device), T)
    first = torch.full_like(at[..., :1], T)
    following = torch.cat([at[..., 1:], first], -1)
    return following.flip(-1).cummin(-1).values.flip(-1)


def _padded(
    rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, bootstrap_B: Tensor, gamma: float, lam: float
) -> Tensor:
    T = rewards_BT.shape[1]
    next_BT = torch.cat([values_BT, bootstrap_B[:, None]], 1).gather(1, _next_valid(mask_BT))
    delta_BT = torch.where(mask_BT, rewards_BT + gamma * next_BT - values_BT, 0.0)
    # Each slot is advantage = delta + decay * carried; outside the mask delta is 0 and decay 1: carried unchanged.
    delta_TB = delta_BT.t().contiguous()
    decay_TB = torch.ones_like(delta_TB).masked_fill_(mask_BT.t(), gamma * lam)
    for t in range(T - 2, -1, -1):
        delta_TB[t].addcmul_(decay_TB[t], delta_TB[t + 1])
    return torch.where(mask_BT, delta_TB.t(), 0.0)


def _packed(
    rewards_N: Tensor,
    values_N: Tensor,
    mask_N: Tensor,
    bootstrap_S: Tensor,
    cu_seqlens: Tensor,
    gamma: float,
    lam: float,
) -> Tensor:
    N, S = len(rewards_N), len(bootstrap_S)
    ends_S = cu_seqlens[1:].long()
    slots_N = torch.arange(N, device=rewards_N.device)
    sequence_N = torch.searchsorted(ends_S, slots_N, right=True).clamp(max=S - 1)
    next_N = _next_valid(mask_N)
    last_N = next_N >= ends_S[sequence_N]
    next_value_N = torch.where(last_N, bootstrap_S[sequence_N], values_N[next_N.clamp(max=N - 1)])
    carried_N = torch.where(mask_N, rewards_N + gamma * next_value_N - values_N, 0.0)
    decay_N = torch.ones_like(carried_N).masked_fill_(mask_N, gamma * lam).masked_fill_(last_N, 0.0)
    # Doubling: after each round a slot has summed twice as many slots after it. log2(N) rounds, whatever the
    # sequence lengths, which are on the device and so unknown here.
    k = 1
    while k < N:
        carried_N = torch.cat([carried_N[:-k] + decay_N[:-k] * carried_N[k:], carried_N[-k:]])
        decay_N = torch.cat([decay_N[:-k] * decay_N[k:], decay_N[-k:]])
        k *= 2
    return torch.where(mask_N, carried_N, 0.0)


def _gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float,
    lam: float,
    bootstrap: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> AdvantagesAndReturns:
    dtype = compute_dtype(rewards, values, bootstrap)
    rewards, values = (torch.where(mask, x.to(dtype), 0.0) for x in (rewards, values))
    if bootstrap is None:
        bootstrap = rewards.new_zeros(len(rewards) if cu_seqlens is None else len(cu_seqlens) - 1)
    bootstrap = bootstrap.to(dtype)
    if rewards.numel() == 0:
        advantages = torch.zeros_like(rewards)
    elif cu_seqlens is None:
        advantages = _padded(rewards, values, mask, bootstrap, gamma, lam)
    else:
        advantages = _packed(rewards, values, mask, bootstrap, cu_seqlens, gamma, lam)
    return AdvantagesAndReturns(advantages, torch.where(mask, advantages + values, 0.0))


def _check(
    rewards: Tensor, values: Tensor, mask: Tensor, mask_name: str, gamma: float, lam: float, packed: bool, debug: bool
) -> None:
    check_float("rewards", rewards)
    if rewards.dim() != (1 if packed else 2):
        layout = "[N] with cu_seqlens" if packed else "[B, T]"
        raise ValueError(f"rewards must be {layout}, got {tuple(rewards.shape)}")
    check_float("values", values, tuple(rewards.shape), "rewards")
    check_mask(mask_name, mask, tuple(rewards.shape), "rewards")
    check_number("gamma", gamma, 0, 1)
    check_number("lam", lam, 0, 1)
    if debug:
        debug_finite("rewards", rewards, mask)
        debug_finite("values", values, mask)


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float,
    lam: float,
    bootstrap: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
    debug: bool = False,
) -> AdvantagesAndReturns:
    """Advantages and returns = advantages + values, by a reverse scan over the valid slots of each sequence.

    rewards, values, mask (bool) [B, T], or packed [N] with cu_seqlens [S + 1] (0 first, N last). Slots outside the
    mask are skipped, as if cut out: the next valid slot follows. After the last valid slot the value is
    `bootstrap` ([B] or [S], default 0). Outside the mask both outputs are exactly 0, whatever the inputs hold.
    fp32 (fp64 for fp64). Not differentiable.
    """
    _check(rewards, values, mask, "mask", gamma, lam, cu_seqlens is not None, debug)
    count = len(rewards)
    if cu_seqlens is not None:
        if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dim() != 1 or len(cu_seqlens) == 0:
            raise ValueError("cu_seqlens must be a 1-D tensor with one entry more than there are sequences")
        check_integer("cu_seqlens", cu_seqlens, tuple(cu_seqlens.shape), "")
        count = len(cu_seqlens) - 1
        if count == 0 and len(rewards) > 0:
            raise ValueError(f"cu_seqlens describes no sequence, but rewards has {len(rewards)} slots")
        if debug:
            ends = (cu_seqlens[:1] == 0) & (cu_seqlens[-1:] == len(rewards))
            debug_true("cu_seqlens", torch.cat([ends, cu_seqlens.diff() >= 0]), f"must rise from 0 to {len(rewards)}")
    if bootstrap is not None:
        check_float("bootstrap", bootstrap, (count,), "the number of sequences")
        if debug:
            debug_finite("bootstrap", bootstrap)
    resolve_backend(backend, rewards.device)
    return _gae(rewards, values, mask, gamma, lam, bootstrap, cu_seqlens)


@torch.no_grad()
def gae_whiten(
    rewards: Tensor,
    values: Tensor,
    value_mask: Tensor,
    policy_mask: Tensor,
    *,
    gamma: float,
    lam: float,
    eps: float = 1e-8,
    backend: str = "auto",
    debug: bool = False,
) -> AdvantagesAndReturns:
    """`gae` over `value_mask`; then advantages whitened over `policy_mask`, exactly 0 outside it.

    All [B, T]. Returns are formed before the whitening and are 0 outside `value_mask`. `policy_mask` should be a
    subset of `value_mask`: a policy slot without a value has advantage 0 before whitening. Not differentiable.
    """
    _check(rewards, values, value_mask, "value_mask", gamma, lam, False, debug)
    check_mask("policy_mask", policy_mask, tuple(rewards.shape), "rewards")
    check_number("eps", eps, 0)
    if debug:
        debug_true("policy_mask", value_mask | ~policy_mask, "must be inside value_mask")
    resolve_backend(backend, rewards.device)
    advantages, returns = _gae(rewards, values, value_mask, gamma, lam)
    return AdvantagesAndReturns(whiten(advantages, policy_mask, True, eps), returns)
