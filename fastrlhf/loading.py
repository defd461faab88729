"""Models and rewards as a configuration names them, on the device and checked."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fastrlhf.config import Config, ModelConfig
from fastrlhf.data import prepare as data
from fastrlhf.data.batching import micro_batches
from fastrlhf.data.tokenize import load_tokenizer
from fastrlhf.models import ScalarModel, check_head, load_policy, load_scalar_model, move, resolve_device
from fastrlhf.reward import rewards
from fastrlhf.scoring import RewardFunction, call_reward_function, load_reward_function

__all__ = ["load_ready", "load_reward", "load_reward_model", "score_function", "set_token_budgets"]


def set_token_budgets(cfg: Config) -> None:
    """Fill in the token budgets that are 0, by `model.device`."""
    cpu = resolve_device(cfg.model.device).type == "cpu"
    cfg.batch.tokens_per_micro_batch = cfg.batch.tokens_per_micro_batch or (2048 if cpu else 16_384)
    cfg.batch.tokens_per_forward = cfg.batch.tokens_per_forward or (4096 if cpu else 32_768)


def load_ready(path: str, cfg: Config) -> PreTrainedModel:
    """The policy at `path`, on `cfg.model.device`, its output projection proven."""
    policy = move(load_policy(path, cfg.model, attn=cfg.attn), cfg.model.device)
    check_head(policy)
    return policy


def load_reward(cfg: Config, tokenizer: PreTrainedTokenizerBase) -> ScalarModel:
    """The frozen reward model at `cfg.ppo.reward_model`, which must share the policy's tokenizer."""
    path = str(cfg.ppo.reward_model)
    data.check_same_tokenizer(path, tokenizer, cfg)
    model = move(load_scalar_model(path, cfg.model, attn=cfg.attn), cfg.model.device)
    return model.requires_grad_(False).eval()


def load_reward_model(path: str, *, device: str = "auto", tokens_per_forward: int = 4096) -> RewardFunction:
    """The model that `fastrlhf reward` wrote to `path`, as a function: (prompts, responses) -> one float each.

    Texts are tokenised as in training: prompt and response apart, EOS after the response. The reward is read at the
    EOS. Raises `UserError` for a folder that is no reward model, `ValueError` for lists of different lengths.
    """
    tokenizer = load_tokenizer(path)
    model = move(load_scalar_model(path, ModelConfig(), field="path"), device).requires_grad_(False).eval()

    @torch.no_grad()
    def score(prompts: list[str], responses: list[str]) -> list[float]:
        sides = [
            tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else []
            for texts in (prompts, responses)
        ]
        rows = [np.array([*p, *r, tokenizer.eos_token_id]) for p, r in zip(*sides, strict=True)]
        out = torch.zeros(len(rows), dtype=torch.float64)
        for group in micro_batches([len(row) for row in rows], tokens_per_forward):
            out[group] = rewards(model, [rows[i] for i in group]).double().cpu()
        return list(out.tolist())

    return score


def score_function(cfg: Config) -> Callable[[list[str], list[str]], list[float]] | None:
    """The checked call of `cfg.ppo.reward_function`, if one is set."""
    if cfg.ppo.reward_function is None:
        return None
    function = load_reward_function(cfg.ppo.reward_function)
    return lambda prompts, responses: call_reward_function(function, prompts, responses)
