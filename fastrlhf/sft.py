"""Supervised fine-tuning (REFERENCE item 9): next-token cross-entropy over query and response.

N = target tokens of a chunk, packed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from fastrlhf.checkpoint import digest
from fastrlhf.config import Config
from fastrlhf.data.batching import micro_batches, pad_right
from fastrlhf.data.tokenize import SFTExample
from fastrlhf.models import hidden_states, packed_logprobs
from fastrlhf.run_folder import RunFolder
from fastrlhf.training import StepResult, fit

__all__ = ["first_target", "sft_loss", "train_sft"]


def first_target(example: SFTExample, loss_on: str) -> int:
    """Index of the first token that is a target: the second one, or the first of the response."""
    return max(1, len(example.query)) if loss_on == "response" else 1


def sft_loss(
    policy: PreTrainedModel,
    rows: Sequence[np.ndarray],
    first_targets: Sequence[int],
    *,
    width: int | None = None,
    backend: str = "auto",
) -> tuple[Tensor, int]:
    """Sum of -log p over the targets of `rows` (token arrays, no padding), and how many targets there are.

    The target at index i of a row is predicted at index i-1; indices before `first_targets[row]` carry no loss.
    Rows are padded to `width`, by default to the longest.
    """
    ids_bL = pad_right(rows, width).to(policy.device)
    L = ids_bL.shape[1]
    positions = np.concatenate(
        [i * L + np.arange(f - 1, len(r) - 1) for i, (r, f) in enumerate(zip(rows, first_targets, strict=True))]
    )
    targets = np.concatenate([r[f:] for r, f in zip(rows, first_targets, strict=True)]).astype(np.int64)
    logprobs_N = packed_logprobs(
        policy,
        hidden_states(policy.base_model, ids_bL),
        torch.from_numpy(positions).to(ids_bL.device),
        torch.from_numpy(targets).to(ids_bL.device),
        backend=backend,
    )
    return -logprobs_N.sum(), len(targets)


def _targets(rows: Sequence[np.ndarray], firsts: Sequence[int]) -> int:
    return sum(len(r) - f for r, f in zip(rows, firsts, strict=True))


def train_sft(policy: PreTrainedModel, examples: Sequence[SFTExample], cfg: Config, run: RunFolder) -> dict[str, float]:
    """Train `policy` in place; the loss is the mean over all target tokens of a batch."""
    rows = [np.concatenate([e.query, e.response]) for e in examples]
    firsts = [first_target(e, cfg.sft.loss_on) for e in examples]

    def batch_loss(batch: list[int]) -> StepResult:
        n = max(1, _targets([rows[i] for i in batch], [firsts[i] for i in batch]))
        total = torch.zeros((), device=policy.device)
        for group in micro_batches([len(rows[i]) for i in batch], cfg.batch.tokens_per_micro_batch):
            picked = [batch[g] for g in group]
            loss, _ = sft_loss(
                policy, [rows[i] for i in picked], [firsts[i] for i in picked], backend=cfg.kernels.backend
            )
            (loss / n).backward()
            total += loss.detach()
        return StepResult({"loss": total / n}, sum(len(rows[i]) for i in batch))

    return fit(policy, len(rows), batch_loss, cfg=cfg, stage="sft", run=run, data=digest([*rows, np.array(firsts)]))


@torch.no_grad()
def evaluate_sft(policy: PreTrainedModel, examples: Sequence[SFTExample], cfg: Config) -> float:
    """Mean -log p per response token over `examples`, in nats."""
    training = policy.training
    policy.eval()
    rows = [np.concatenate([e.query, e.response]) for e in examples]
    firsts = [first_target(e, "response") for e in examples]
    total, n = torch.zeros((), device=policy.device), 0
    for group in micro_batches([len(r) for r in rows], cfg.batch.tokens_per_forward):
        loss, k = sft_loss(policy, [rows[i] for i in group], [firsts[i] for i in group], backend=cfg.kernels.backend)
        total, n = total + loss, n + k
    policy.train(training)
    return float(total) / max(1, n)
