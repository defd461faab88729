"""The decode loop: prefill once, then one token per step over a static key-value cache.

B = rows of a batch, T = response slots, L = longest query, V = vocabulary.

Rows sit left-padded in their batch, so that all of them write the same cache column at each step; the mask hides
the padding, and positions count from each row's first token. Only the last position is projected to the vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, StaticCache

from fastrlhf.rollout.sampling import sample_rows

__all__ = ["NotFiniteError", "decode"]


class NotFiniteError(RuntimeError):
    """The model gave logits that cannot be sampled from."""


def decode(
    model: PreTrainedModel,
    queries: Sequence[np.ndarray],
    uniforms_BT: Tensor | None,
    *,
    response_length: int,
    temperature: float,
    eos_id: int,
    pad_id: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One batch: int64 responses [B,T] (`eos_id` after the end), fp32 log-probabilities [B,T] (0 after the end),
    lengths [B] with the EOS, and which rows ended.

    `uniforms_BT`: one draw per slot, None for greedy. Raises `RuntimeError` when logits were not finite.
    """
    device = model.device
    B, T, L = len(queries), response_length, max(len(q) for q in queries)
    ids, mask = np.zeros((B, L), dtype=np.int64), np.zeros((B, L + T), dtype=bool)
    for b, query in enumerate(queries):
        ids[b, L - len(query) :] = query
        mask[b, L - len(query) : L] = True
    ids_BL, mask_BS = torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device)
    position_ids = (mask_BS[:, :L].cumsum(1) - 1).clamp_(min=0)
    next_position_B = position_ids[:, -1] + 1
    step = _Step(model, StaticCache(config=model.config, max_cache_len=L + T))

    responses_BT = torch.full((B, T), eos_id, device=device)
    logprobs_BT = torch.zeros(B, T, device=device)
    lengths_B = torch.full((B,), T, device=device)
    ended_B = torch.zeros(B, dtype=torch.bool, device=device)
    usable_B = torch.ones(B, dtype=torch.bool, device=device)
    if uniforms_BT is not None:
        uniforms_BT = uniforms_BT.to(device)

    hidden_BD = step(ids_BL, mask_BS[:, :L], position_ids)
    # Checking on every step costs a GPU its run-ahead; on a CPU the check is free and a step is not.
    check_every = 8 if device.type == "cuda" else 1
    for t in range(T):
        logits_BV = step.logits(hidden_BD).div_(temperature)
        if pad_id < logits_BV.shape[1]:
            logits_BV[:, pad_id] = -float("inf")
        tokens_B, step_B, ok_B = sample_rows(logits_BV, None if uniforms_BT is None else uniforms_BT[:, t])
        responses_BT[:, t] = torch.where(ended_B, eos_id, tokens_B)
        logprobs_BT[:, t] = torch.where(ended_B, 0.0, step_B)
        usable_B &= ok_B | ended_B
        now_B = (tokens_B == eos_id) & ~ended_B
        lengths_B = torch.where(now_B, t + 1, lengths_B)
        ended_B |= now_B
        if t + 1 == T or ((t + 1) % check_every == 0 and bool(ended_B.all())):
            break
        mask_BS[:, L + t] = True
        hidden_BD = step(responses_BT[:, t : t + 1], mask_BS[:, : L + t + 1], (next_position_B + t)[:, None])
    if not bool(usable_B.all()):
        row = int((~usable_B).nonzero()[0])
        raise NotFiniteError(f"logits were not finite while sampling the response to row {row} of a batch")
    return responses_BT, logprobs_BT, lengths_B, ended_B


class _Step:
    """The model as the loop calls it: tokens in, last hidden state out, keys and values kept in the cache."""

    def __init__(self, model: PreTrainedModel, cache: StaticCache) -> None:
        self.backbone = model.base_model
        self.head = cast(nn.Linear, model.get_output_embeddings())
        self.softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
        # transformers renames the argument in the course of its version 5.
        accepted = inspect.signature(self.backbone.forward).parameters
        self.cache = {"cache" if "cache" in accepted else "past_key_values": cache}

    def __call__(self, ids_BL: Tensor, mask_BS: Tensor, position_ids_BL: Tensor) -> Tensor:
        output = self.backbone(
            input_ids=ids_BL, attention_mask=mask_BS.long(), position_ids=position_ids_BL, use_cache=True, **self.cache
        )
        return cast(Tensor, output.last_hidden_state[:, -1])

    def logits(self, hidden_BD: Tensor) -> Tensor:
        """fp32 [B,V], a fresh tensor that the caller may overwrite."""
        logits_BV = self.head(hidden_BD).float()
        if self.softcap is not None:
            logits_BV = torch.tanh(logits_BV / self.softcap) * self.softcap
        return logits_BV
