"""PPO as in "The N+ Implementation Details of RLHF with PPO" (arXiv 2403.17031), REFERENCE section 2, step by step.

`score` and `make_experience` are steps 1 to 9, `optimize` is step 10; the arithmetic is fastrlhf_kernels'.
B = episodes, T = response slots, N = valid slots, packed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from fastrlhf_kernels import gae_whiten, masked_whiten, ppo_loss, shape_rewards
from torch import Tensor, nn
from transformers import PreTrainedModel

from fastrlhf.config import PPOConfig
from fastrlhf.episodes import Chunk, Rollout
from fastrlhf.models import ScalarModel, hidden_states, packed_logprobs

__all__ = ["Experience", "MicroBatch", "PPOModels", "Scores", "Settings", "make_experience", "optimize", "score"]


@dataclass(frozen=True, slots=True)
class PPOModels:
    """The four models. The reference policy and the reward model are frozen; without a reward model, scores
    come from a function."""

    policy: PreTrainedModel
    ref_policy: PreTrainedModel
    critic: ScalarModel
    reward_model: ScalarModel | None

    def trained(self) -> nn.ModuleDict:
        return nn.ModuleDict({"policy": self.policy, "critic": self.critic})


@dataclass(frozen=True, slots=True)
class Settings:
    """What the update needs to know beside `PPOConfig`."""

    ppo: PPOConfig
    temperature: float
    """Already with the paper's 1e-7 added."""
    tokens_per_micro_batch: int
    tokens_per_forward: int
    backend: str = "auto"


class Scores(NamedTuple):
    """Step 1. fp32; slots outside the masks are 0."""

    logprobs_BT: Tensor
    ref_logprobs_BT: Tensor
    values_BT: Tensor
    scores_B: Tensor


@dataclass(frozen=True, slots=True)
class Experience:
    """Steps 2 to 9: everything the update reads. All [B,T] tensors are 0 outside their mask."""

    rollout: Rollout
    mask_BT: Tensor
    """Policy slots, 0..last."""
    value_mask_BT: Tensor
    """Value slots, 0..last+1."""
    logprobs_BT: Tensor
    ref_logprobs_BT: Tensor
    values_BT: Tensor
    scores_B: Tensor
    kl_BT: Tensor
    rewards_BT: Tensor
    advantages_BT: Tensor
    returns_BT: Tensor


@torch.no_grad()
def score(rollout: Rollout, models: PPOModels, settings: Settings, scores_B: Tensor | None = None) -> Scores:
    """Step 1: log-probabilities under policy and reference, values, and the reward at the last kept token.

    `scores_B` [B]: scores from elsewhere; the reward model is then not run.
    """
    device = models.policy.device
    B, T = rollout.rows, rollout.response_length
    dtype = torch.promote_types(models.policy.dtype, torch.float32)
    logprobs, ref_logprobs, values = (torch.zeros(B * T, device=device, dtype=dtype) for _ in range(3))
    scores = torch.zeros(B, device=device, dtype=dtype) if scores_B is None else scores_B.to(device, dtype)
    recompute = settings.ppo.old_logprobs == "recompute"
    for chunk in rollout.chunks(range(B), settings.tokens_per_forward, device):
        ref_logprobs[chunk.policy_slots_N] = _logprobs(models.ref_policy, chunk, settings)
        if recompute:
            logprobs[chunk.policy_slots_N] = _logprobs(models.policy, chunk, settings)
        values[chunk.value_slots_N] = _values(models.critic, chunk)
        if scores_B is None:
            reward_model = cast(ScalarModel, models.reward_model)
            hidden = hidden_states(reward_model.lm_backbone, chunk.ids_bL, chunk.attention_mask_bL)
            rows = torch.tensor(chunk.rows, device=device)
            scores[rows] = reward_model.head(hidden.flatten(0, 1)[chunk.end_positions_b])
    if not recompute:
        if rollout.sampler_logprobs_BT is None:
            raise ValueError("old_logprobs='sampler' needs a rollout that carries sampler_logprobs_BT")
        logprobs = rollout.sampler_logprobs_BT.to(device, dtype).flatten()
    return Scores(logprobs.view(B, T), ref_logprobs.view(B, T), values.view(B, T), scores)


def _logprobs(policy: PreTrainedModel, chunk: Chunk, settings: Settings) -> Tensor:
    hidden = hidden_states(policy.base_model, chunk.ids_bL, chunk.attention_mask_bL)
    return cast(
        Tensor,
        packed_logprobs(
            policy,
            hidden,
            chunk.policy_positions_N,
            chunk.policy_ids_N,
            temperature=settings.temperature,
            backend=settings.backend,
        ),
    )


def _values(critic: ScalarModel, chunk: Chunk) -> Tensor:
    hidden = hidden_states(critic.lm_backbone, chunk.ids_bL, chunk.attention_mask_bL)
    return critic.head(hidden.flatten(0, 1).index_select(0, chunk.value_positions_N))


@torch.no_grad()
def make_experience(rollout: Rollout, scored: Scores, settings: Settings) -> Experience:
    """Steps 2 to 9: from scores to whitened advantages and returns."""
    ppo, backend = settings.ppo, settings.backend
    logprobs_BT, ref_logprobs_BT, values_BT, scores_B = scored
    # 2. The EOS rule: a response without EOS gets a fixed score instead of the model's (replaced, not added).
    if ppo.missing_eos_score is not None:
        scores_B = torch.where(rollout.has_eos_B, scores_B, ppo.missing_eos_score)
    # 3. Two masks: a policy slot is a kept token; the value has one slot more, the state after the last token.
    mask_BT, value_mask_BT = rollout.masks_BT()
    # 4.-5. KL penalty at every kept token; the score one slot after the last token, on it if there is no slot left.
    rewards_BT, kl_BT = shape_rewards(
        logprobs_BT, ref_logprobs_BT, scores_B, rollout.last_index_B(), kl_coef=ppo.kl_coef, backend=backend
    )
    # 6. Optional whitening of the rewards, mean kept.
    if ppo.whiten_rewards:
        rewards_BT = masked_whiten(rewards_BT, value_mask_BT, shift_mean=False, backend=backend)
    # 7.-9. GAE over the value slots, returns before whitening, advantages whitened over the policy slots.
    advantages_BT, returns_BT = gae_whiten(
        rewards_BT, values_BT, value_mask_BT, mask_BT, gamma=ppo.gamma, lam=ppo.lam, backend=backend
    )
    return Experience(
        rollout=rollout,
        mask_BT=mask_BT,
        value_mask_BT=value_mask_BT,
        logprobs_BT=logprobs_BT,
        ref_logprobs_BT=ref_logprobs_BT,
        values_BT=values_BT,
        scores_B=scores_B,
        kl_BT=kl_BT,
        rewards_BT=rewards_BT,
        advantages_BT=advantages_BT,
        returns_BT=returns_BT,
    )


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One loss mean of the update, as an observer sees it before the optimiser moves."""

    epoch: int
    minibatch: int
    rows: list[int]
    last: bool
    """The optimiser steps after this one."""
    parts: list[tuple[Chunk, Tensor, Tensor]]
    """Chunk, its new log-probabilities [N] and its values [N]."""
    stats: dict[str, Tensor]


def optimize(
    experience: Experience,
    models: PPOModels,
    optimizer: torch.optim.Optimizer,
    orders: Sequence[Sequence[int]],
    *,
    minibatch_size: int,
    micro_batch_size: int,
    settings: Settings,
    observer: Callable[[MicroBatch], None] | None = None,
) -> dict[str, Tensor]:
    """Step 10: one epoch per permutation in `orders`, minibatches of `minibatch_size` rows, one optimiser step each.

    Under `loss_reduction: minibatch` a loss is the token mean over the minibatch; under `microbatch` it is the
    mean over micro-batches of `micro_batch_size` rows of their token means, as in the reference. How many rows a
    pass holds (`tokens_per_micro_batch`) changes neither. Returns the means over the update as 0-d tensors.
    """
    ppo = settings.ppo
    size = micro_batch_size if ppo.loss_reduction == "microbatch" else minibatch_size
    n_micro = minibatch_size // size
    params = [p for group in optimizer.param_groups for p in group["params"]]
    collected: list[dict[str, Tensor]] = []
    norms: list[Tensor] = []
    for epoch, order in enumerate(orders):
        for start in range(0, len(order), minibatch_size):
            minibatch = order[start : start + minibatch_size]
            for m in range(n_micro):
                rows = list(minibatch[m * size : (m + 1) * size])
                stats, parts = _accumulate(experience, models, rows, 1 / n_micro, settings, keep=observer is not None)
                collected.append(stats)
                if observer is not None:
                    observer(MicroBatch(epoch, start // minibatch_size, rows, m + 1 == n_micro, parts, stats))
            norms.append(_clip(params, ppo.max_grad_norm))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    means = {key: torch.stack([stats[key] for stats in collected]).mean() for key in collected[0]}
    means["ratio_max"] = torch.stack([stats["ratio_max"] for stats in collected]).max()
    means["grad_norm"] = torch.stack(norms).mean()
    return means


def _clip(params: list[nn.Parameter], max_norm: float | None) -> Tensor:
    grads = [p.grad for p in params if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads)
    if max_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm)
    return norm


def _accumulate(
    exp: Experience, models: PPOModels, rows: list[int], weight: float, settings: Settings, *, keep: bool
) -> tuple[dict[str, Tensor], list[tuple[Chunk, Tensor, Tensor]]]:
    """Forward and backward over `rows`, chunk by chunk; the loss is `weight` times their token mean."""
    ppo, T = settings.ppo, exp.rollout.response_length
    # Lengths are known on the host, so no normaliser costs a sync. An all-empty micro-batch has loss 0, not 0/0.
    lengths = [len(exp.rollout.responses[r]) for r in rows]
    n = max(sum(lengths), 1)
    n_value = max(sum(min(k + 1, T) for k in lengths), 1)
    flat = {name: getattr(exp, f"{name}_BT").flatten() for name in ("logprobs", "advantages", "values", "returns")}
    sums: list[dict[str, Tensor]] = []
    parts = []
    for chunk in exp.rollout.chunks(rows, settings.tokens_per_micro_batch, models.policy.device):
        new_logprobs_N = _logprobs(models.policy, chunk, settings)
        new_values_N = _values(models.critic, chunk)
        loss, _, _, stats = ppo_loss(
            new_logprobs_N,
            flat["logprobs"][chunk.policy_slots_N],
            flat["advantages"][chunk.policy_slots_N],
            new_values_N,
            flat["values"][chunk.value_slots_N],
            flat["returns"][chunk.value_slots_N],
            torch.ones_like(chunk.policy_slots_N, dtype=torch.bool),
            torch.ones_like(chunk.value_slots_N, dtype=torch.bool),
            clip=ppo.clip,
            value_clip=ppo.value_clip,
            vf_coef=ppo.vf_coef * weight,
            normalizer=n / weight,
            value_normalizer=n_value,
            backend=settings.backend,
        )
        loss.backward()
        sums.append(stats._asdict())
        if keep:
            parts.append((chunk, new_logprobs_N.detach(), new_values_N.detach()))
    total = {key: torch.stack([s[key] for s in sums]) for key in sums[0]}
    pg_loss, vf_loss = total["pg_loss_sum"].sum() / n, total["vf_loss_sum"].sum() / n_value
    means = {
        "pg_loss": pg_loss,
        "vf_loss": vf_loss,
        "loss": pg_loss + ppo.vf_coef * vf_loss,
        "pg_clipfrac": total["pg_clipped"].sum() / n,
        "vf_clipfrac": total["vf_clipped"].sum() / n_value,
        "ratio": total["ratio_sum"].sum() / n,
        "ratio_max": total["ratio_max"].max(),
        "approxkl": total["kl_k2_sum"].sum() / n,
    }
    return means, parts
