"""Ops of PPO-RLHF that depend on torch alone. Each op's contract is in kernels/README.md."""

from fastrlhf_kernels._backend import Backend, resolve_backend, which_backend
from fastrlhf_kernels.gae import AdvantagesAndReturns, gae, gae_whiten
from fastrlhf_kernels.linear_logprobs import linear_token_logprobs
from fastrlhf_kernels.logprobs import LogprobsAndEntropy, token_logprobs
from fastrlhf_kernels.ppo_loss import PPOLoss, PPOStats, ppo_loss
from fastrlhf_kernels.rewards import ShapedRewards, shape_rewards
from fastrlhf_kernels.whiten import masked_whiten

__all__ = [
    "AdvantagesAndReturns",
    "Backend",
    "LogprobsAndEntropy",
    "PPOLoss",
    "PPOStats",
    "ShapedRewards",
    "gae",
    "gae_whiten",
    "linear_token_logprobs",
    "masked_whiten",
    "ppo_loss",
    "resolve_backend",
    "shape_rewards",
    "token_logprobs",
    "which_backend",
]
