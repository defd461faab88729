"""Drawing one token per row from logits, without a host sync.

B = rows, V = vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["sample_rows"]

# Blocks of the two-level cumulative sum. A flat fp32 cumsum over 50k entries drifts; two short ones do not.
_BLOCK = 256


def sample_rows(logits_BV: Tensor, uniform_B: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, their log-probabilities, and whether each row's logits were usable.

    `logits_BV` in fp32, temperature applied, blocked tokens at -inf; it is overwritten. `uniform_B` in [0, 1): one
    draw per row for inverse-CDF sampling; None takes the largest logit. A token of probability 0 is never drawn. A
    row with NaN or +inf gives some token and False.
    """
    top_B, greedy_B = logits_BV.max(-1)
    probs_BV = logits_BV.sub_(top_B[:, None]).exp_()
    if uniform_B is None:
        total_B = probs_BV.sum(-1)
        return greedy_B, -total_B.log(), total_B.isfinite() & top_B.isfinite()
    B, V = probs_BV.shape
    padded = torch.nn.functional.pad(probs_BV, (0, -V % _BLOCK)) if V % _BLOCK else probs_BV
    blocks = padded.view(B, -1, _BLOCK)
    ends_BK = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    total_B = ends_BK[:, -1]
    target_B = uniform_B.double() * total_B
    # The first block whose end lies above the target holds the token; the clamp only acts on unusable rows.
    block_B = torch.searchsorted(ends_BK, target_B[:, None], right=True)[:, 0].clamp_(max=ends_BK.shape[1] - 1)
    before_B = torch.where(block_B > 0, ends_BK.gather(1, (block_B - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    rows = torch.arange(B, device=probs_BV.device)
    inside = blocks[rows, block_B].double()
    within_B = torch.searchsorted(inside.cumsum(-1), (target_B - before_B)[:, None], right=True)[:, 0]
    # Rounding between the two sums can step past the last token of the block that has any probability.
    last_B = _BLOCK - 1 - (inside > 0).flip(-1).to(torch.uint8).argmax(-1)
    tokens_B = (block_B * _BLOCK + torch.minimum(within_B, last_B)).clamp_(max=V - 1)
    chosen_B = probs_BV.gather(1, tokens_B[:, None])[:, 0].double()
    logprobs_B = (chosen_B.log() - total_B.log()).float()
    return tokens_B, logprobs_B, total_B.isfinite() & top_B.isfinite()
