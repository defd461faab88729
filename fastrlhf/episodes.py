"""What PPO passes between its steps: the episodes of one rollout, and the chunks that a forward pass takes.

B = episodes, T = response slots, L = longest row of a chunk, b = rows of a chunk, N = valid slots of a chunk, packed.

A row is query then kept response, from position 0, padded on the right. The token at slot t is predicted at
position q + t - 1, so that position also carries the value before slot t (REFERENCE section 2, step 1).
Nothing after the kept response is ever fed: attention is causal, so no kept number depends on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fastrlhf.data.batching import micro_batches

__all__ = ["Chunk", "RecordedLayout", "Rollout"]


@dataclass(frozen=True, slots=True)
class RecordedLayout:
    """Rows as the reference has them: padded on the left to one query length, and to one full width.

    The mathematics is the same, but rounding depends on shapes and rotary angles, and Adam enlarges it where
    gradients are near 0: a replay follows the recording to agree to the last digits.
    """

    columns: list[int]
    """Column of each row's first token."""
    width: int


@dataclass(frozen=True, slots=True)
class Rollout:
    """Sampled episodes with their lengths; no mask is ever inferred from token ids."""

    queries: list[np.ndarray]
    """B arrays of ids, no padding."""
    responses: list[np.ndarray]
    """B arrays: the kept tokens, first EOS included; empty if the first token was PAD."""
    has_eos_B: Tensor
    """bool: the kept response ends with EOS."""
    response_length: int
    """T, the slots per response."""
    sampler_logprobs_BT: Tensor | None = None
    """fp32 log-probabilities recorded while sampling, 0 after the kept response."""
    recorded: RecordedLayout | None = None
    """Where a recording had the rows; None lays them out tightly."""

    @property
    def rows(self) -> int:
        return len(self.queries)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row, query and kept response."""
        return [len(q) + len(r) for q, r in zip(self.queries, self.responses, strict=True)]

    def last_index_B(self) -> Tensor:
        """int64 [B]: slot of the last kept token, -1 if none (the reference's `sequence_lengths`)."""
        last = [len(r) - 1 for r in self.responses]
        return torch.tensor(last, device=self.has_eos_B.device)

    def masks_BT(self) -> tuple[Tensor, Tensor]:
        """bool [B,T] policy slots 0..last, and value slots 0..last+1 (the reference's two padding masks, inverted)."""
        slots = torch.arange(self.response_length, device=self.has_eos_B.device)
        last = self.last_index_B()[:, None]
        return slots <= last, slots <= last + 1

    def chunks(self, rows: Sequence[int], tokens: int, device: torch.device) -> list[Chunk]:
        """Cut `rows` into chunks of at most `tokens` tokens, padding included, rows of like length together."""
        lengths = self.lengths
        groups = micro_batches([lengths[r] for r in rows], tokens)
        return [Chunk.build(self, [rows[i] for i in group], device) for group in groups]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows of one forward pass, with the packed positions of their valid slots."""

    rows: list[int]
    ids_bL: Tensor
    policy_positions_N: Tensor
    """Into the flattened [b*L]: where the token of each policy slot is predicted."""
    policy_ids_N: Tensor
    """The token sampled at each policy slot."""
    policy_slots_N: Tensor
    """Into the flattened [B*T] of the rollout."""
    value_positions_N: Tensor
    value_slots_N: Tensor
    end_positions_b: Tensor
    """Into the flattened [b*L]: the last kept token, where the reward model is read."""
    attention_mask_bL: Tensor | None
    """Only for a recorded layout; tight rows need none."""

    @staticmethod
    def build(rollout: Rollout, rows: list[int], device: torch.device) -> Chunk:
        T, layout = rollout.response_length, rollout.recorded
        starts = [0] * len(rows) if layout is None else [layout.columns[r] for r in rows]
        ends = [s + len(rollout.queries[r]) + len(rollout.responses[r]) for s, r in zip(starts, rows, strict=True)]
        L = max(ends) if layout is None else layout.width
        ids = np.zeros((len(rows), L), dtype=np.int64)
        mask = np.zeros((len(rows), L), dtype=np.int64)
        positions, targets, slots, value_positions, value_slots = [], [], [], [], []
        for i, (r, start, end) in enumerate(zip(rows, starts, ends, strict=True)):
            query, response = rollout.queries[r], rollout.responses[r]
            n = len(response)
            ids[i, start : end - n] = query
            ids[i, end - n : end] = response
            mask[i, start:end] = 1
            first = i * L + end - n - 1
            positions.append(np.arange(first, first + n))
            targets.append(response)
            slots.append(np.arange(r * T, r * T + n))
            n_value = min(n + 1, T)
            value_positions.append(np.arange(first, first + n_value))
            value_slots.append(np.arange(r * T, r * T + n_value))
        last = np.arange(len(rows)) * L + np.array(ends) - 1

        def put(parts: list[np.ndarray] | np.ndarray) -> Tensor:
            array = np.concatenate(parts) if isinstance(parts, list) else parts
            return torch.from_numpy(array.astype(np.int64, copy=False)).to(device, non_blocking=True)

        return Chunk(
            rows=rows,
            ids_bL=put(ids),
            policy_positions_N=put(positions),
            policy_ids_N=put(targets),
            policy_slots_N=put(slots),
            value_positions_N=put(value_positions),
            value_slots_N=put(value_slots),
            end_positions_b=put(last),
            attention_mask_bL=None if layout is None else put(mask),
        )
