"""Models and rewards as a configuration names them, on the device and checked."""

from __future__ import annotations

from collections.abc import Callable

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fastrlhf.config import Config
from fastrlhf.data import prepare as data
from fastrlhf.models import ScalarModel, check_head, load_policy, load_scalar_model, move, resolve_device
from fastrlhf.scoring import call_reward_function, load_reward_function

__all__ = ["load_ready", "load_reward", "score_function", "set_token_budgets"]


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


def score_function(cfg: Config) -> Callable[[list[str], list[str]], list[float]] | None:
    """The checked call of `cfg.ppo.reward_function`, if one is set."""
    if cfg.ppo.reward_function is None:
        return None
    function = load_reward_function(cfg.ppo.reward_function)
    return lambda prompts, responses: call_reward_function(function, prompts, responses)
