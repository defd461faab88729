"""shape_rewards: the KL penalty of each token and the score of the response, as per-token rewards.

B = responses, T = response slots.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from fastrlhf_kernels._backend import (
    check_float,
    check_integer,
    check_number,
    compute_dtype,
    debug_finite,
    debug_true,
    resolve_backend,
)

Estimator = Literal["k1", "k2", "k3"]


class ShapedRewards(NamedTuple):
    rewards: Tensor
    kl: Tensor


def kl_estimate(d: Tensor, estimator: str) -> Tensor:
    """Estimate of KL(policy || ref) from d = logprob - ref_logprob at tokens of the policy."""
    if estimator == "k1":
        return d
    if estimator == "k2":
        return 0.5 * d.square()
    return torch.expm1(-d) + d


@torch.no_grad()
def shape_rewards(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    scores: Tensor,
    last_index: Tensor,
    *,
    kl_coef: float,
    estimator: str = "k1",
    backend: str = "auto",
    debug: bool = False,
) -> ShapedRewards:
    """rewards = -kl_coef * kl at slots <= last_index, plus the score at slot last_index + 1, or last_index if that
    is the last slot.

    logprobs, ref_logprobs [B, T]; scores [B]; last_index [B], the index of the last kept response token, from -1
    (none) to T - 1. kl is 0 after last_index, whatever the log-probabilities hold there. Estimators, with
    d = logprob - ref_logprob: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d. fp32 (fp64 for fp64). Not differentiable.
    """
    check_float("logprobs", logprobs)
    if logprobs.dim() != 2:
        raise ValueError(f"logprobs must be [B, T], got {tuple(logprobs.shape)}")
    B, T = logprobs.shape
    check_float("ref_logprobs", ref_logprobs, (B, T), "logprobs")
    check_float("scores", scores, (B,), "logprobs")
    check_integer("last_index", last_index, (B,), "logprobs")
    check_number("kl_coef", kl_coef)
    if estimator not in get_args(Estimator):
        raise ValueError(f"estimator {estimator!r} does not exist; there are {', '.join(get_args(Estimator))}")
    resolve_backend(backend, logprobs.device)
    slots_T = torch.arange(T, device=logprobs.device)
    valid_BT = slots_T <= last_index[:, None]
    if debug:
        debug_true("last_index", (last_index >= -1) & (last_index < max(T, 1)), f"must be in [-1, {T})")
        debug_finite("logprobs", logprobs, valid_BT)
        debug_finite("ref_logprobs", ref_logprobs, valid_BT)
        debug_finite("scores", scores)
    dtype = compute_dtype(logprobs, ref_logprobs, scores)
    d_BT = torch.where(valid_BT, logprobs.to(dtype) - ref_logprobs.to(dtype), 0.0)
    kl_BT = kl_estimate(d_BT, estimator)
    penalty_BT = torch.where(valid_BT, -kl_coef * kl_BT, 0.0)
    score_slot_B = (last_index + 1).clamp(max=T - 1)
    rewards_BT = torch.where(slots_T == score_slot_B[:, None], penalty_BT + scores.to(dtype)[:, None], penalty_BT)
    return ShapedRewards(rewards_BT, kl_BT)
