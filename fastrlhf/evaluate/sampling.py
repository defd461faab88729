"""Sampling a policy on prompts, and its distance from another policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fastrlhf.config import Config
from fastrlhf.episodes import Rollout
from fastrlhf.models import hidden_states, packed_logprobs
from fastrlhf.rollout import generate

__all__ = ["Samples", "sample", "sampled_kl"]


@dataclass(frozen=True, slots=True)
class Samples:
    """Responses of one policy, in the order of the prompts."""

    rollout: Rollout
    texts: list[str]
    """Decoded without special tokens."""
    ended: list[bool]
    """The response has its EOS."""


def sample(
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    queries: Sequence[np.ndarray],
    cfg: Config,
    *,
    temperature: float,
    generator: torch.Generator,
) -> Samples:
    """One response to each query (arrays of ids, no padding)."""
    got = generate(
        policy,
        queries,
        response_length=cfg.rollout.response_length,
        temperature=temperature,
        eos_id=tokenizer.eos_token_id,
        pad_id=tokenizer.pad_token_id,
        generator=generator,
        engine=cfg.rollout.engine,
        rows_per_batch=cfg.rollout.rows_per_batch,
    )
    lengths = got.lengths_B.tolist()
    tokens = got.responses_BT.cpu().numpy()
    responses = [row[:n].astype(np.int64) for row, n in zip(tokens, lengths, strict=True)]
    rollout = Rollout(
        queries=list(queries),
        responses=responses,
        has_eos_B=got.has_eos_B.to(policy.device),
        response_length=tokens.shape[1],
        sampler_logprobs_BT=got.logprobs_BT,
    )
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    return Samples(rollout, texts, got.has_eos_B.tolist())


@torch.no_grad()
def sampled_kl(
    policy: PreTrainedModel, other: PreTrainedModel, rollout: Rollout, cfg: Config, *, temperature: float
) -> float:
    """Mean over responses of the summed log-ratio policy/other of the tempered distributions, in nats per response.

    The responses must have been sampled from `policy` at `temperature`.
    """
    total = torch.zeros((), device=policy.device)
    for chunk in rollout.chunks(range(rollout.rows), cfg.batch.tokens_per_forward, policy.device):
        sides = [
            packed_logprobs(
                model,
                hidden_states(model.base_model, chunk.ids_bL, chunk.attention_mask_bL),
                chunk.policy_positions_N,
                chunk.policy_ids_N,
                temperature=temperature + 1e-7,
                backend=cfg.kernels.backend,
            )
            for model in (policy, other)
        ]
        total += (sides[0] - sides[1]).sum()
    return float(total) / max(1, rollout.rows)
