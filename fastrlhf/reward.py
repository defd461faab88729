"""The reward model (REFERENCE items 10 to 15): pairwise loss on the score at the last token, then a bias.

P = pairs of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fastrlhf.checkpoint import digest
from fastrlhf.config import Config
from fastrlhf.data.batching import micro_batches, pad_right
from fastrlhf.data.tokenize import PreferenceExample, SFTExample
from fastrlhf.models import ScalarModel, hidden_states
from fastrlhf.run_folder import RunFolder
from fastrlhf.training import StepResult, fit

__all__ = ["accuracy", "normalize", "pair_rewards", "rewards", "train_reward"]


def rewards(model: ScalarModel, rows: Sequence[np.ndarray], width: int | None = None) -> Tensor:
    """fp32 reward of each row (token arrays, no padding), read at its last token.

    Rows are padded to `width`, by default to the longest.
    """
    ids_bL = pad_right(rows, width).to(model.scalar_head.weight.device)
    ends = torch.tensor([i * ids_bL.shape[1] + len(r) - 1 for i, r in enumerate(rows)], device=ids_bL.device)
    hidden_BLD = hidden_states(model.lm_backbone, ids_bL)
    return model.head(hidden_BLD.flatten(0, 1).index_select(0, ends))


def pair_rewards(
    model: ScalarModel, chosen: Sequence[np.ndarray], rejected: Sequence[np.ndarray], width: int | None = None
) -> tuple[Tensor, Tensor]:
    """Rewards of the two sides of each pair, [P] and [P], from one forward pass."""
    both = rewards(model, [*chosen, *rejected], width)
    return both[: len(chosen)], both[len(chosen) :]


def _sides(examples: Sequence[PreferenceExample]) -> tuple[list[np.ndarray], list[np.ndarray], list[int]]:
    chosen = [np.concatenate([e.query, e.chosen]) for e in examples]
    rejected = [np.concatenate([e.query, e.rejected]) for e in examples]
    return chosen, rejected, [max(len(c), len(r)) for c, r in zip(chosen, rejected, strict=True)]


def train_reward(
    model: ScalarModel, examples: Sequence[PreferenceExample], cfg: Config, run: RunFolder
) -> dict[str, float]:
    """Train `model` in place on -log sigmoid(chosen - rejected), mean over the pairs of a batch."""
    chosen, rejected, lengths = _sides(examples)

    def batch_loss(batch: list[int]) -> StepResult:
        sums = torch.zeros(4, device=model.scalar_head.weight.device)
        # Two rows a pair.
        for group in micro_batches([lengths[i] for i in batch], cfg.batch.tokens_per_micro_batch // 2):
            picked = [batch[g] for g in group]
            r_c, r_r = pair_rewards(model, [chosen[i] for i in picked], [rejected[i] for i in picked])
            loss = -F.logsigmoid(r_c - r_r).sum()
            (loss / len(batch)).backward()
            sums += torch.stack([loss.detach(), (r_c > r_r).sum().float(), r_c.detach().sum(), r_r.detach().sum()])
        names = ("loss", "accuracy", "chosen_rewards", "rejected_rewards")
        tokens = sum(len(chosen[i]) + len(rejected[i]) for i in batch)
        return StepResult(dict(zip(names, (sums / len(batch)).unbind(), strict=True)), tokens)

    return fit(model, len(chosen), batch_loss, cfg=cfg, stage="reward", run=run, data=digest([*chosen, *rejected]))


@torch.no_grad()
def accuracy(model: ScalarModel, examples: Sequence[PreferenceExample], cfg: Config) -> float:
    """Share of pairs whose chosen side scores strictly higher."""
    chosen, rejected, lengths = _sides(examples)
    right = torch.zeros((), device=model.scalar_head.weight.device)
    for group in micro_batches(lengths, cfg.batch.tokens_per_forward // 2):
        r_c, r_r = pair_rewards(model, [chosen[i] for i in group], [rejected[i] for i in group])
        right += (r_c > r_r).sum()
    return float(right) / max(1, len(examples))


@torch.no_grad()
def normalize(model: ScalarModel, examples: Sequence[SFTExample], cfg: Config) -> float:
    """Shift the rewards so that the SFT references average 0 (REFERENCE item 15); returns the config's new bias."""
    rows = [np.concatenate([e.query, e.response]) for e in examples]
    total = torch.zeros((), dtype=torch.float64, device=model.scalar_head.weight.device)
    for group in micro_batches([len(r) for r in rows], cfg.batch.tokens_per_forward):
        total += rewards(model, [rows[i] for i in group]).double().sum()
    model.config.bias = model.config.bias + float(total) / max(1, len(rows))
    return float(model.config.bias)
