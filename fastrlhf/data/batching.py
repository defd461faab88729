"""Batches: which rows go together, and how they are padded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["PromptStream", "epoch_order", "micro_batches", "pad_right"]


def epoch_order(n: int, generator: torch.Generator) -> list[int]:
    """A permutation of 0..n-1 drawn from `generator`."""
    return torch.randperm(n, generator=generator).tolist()


def micro_batches(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Indices into `lengths`, cut so that rows x longest <= `tokens` in each batch, rows of like length together.

    A single row above the budget gets a batch of its own. Ties keep their order, so the result is deterministic.
    """
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batches and (len(batches[-1]) + 1) * lengths[i] <= tokens:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


def pad_right(rows: Sequence[np.ndarray], length: int | None = None, fill: int = 0) -> Tensor:
    """Rows of ids -> int64 [B,L], padded on the right with `fill` to `length`, by default the longest row's."""
    L = max((len(r) for r in rows), default=0) if length is None else length
    out = np.full((len(rows), L), fill, dtype=np.int64)
    for i, row in enumerate(rows):
        if len(row) > L:
            raise ValueError(f"row {i} has {len(row)} ids, more than length {L}")
        out[i, : len(row)] = row
    return torch.from_numpy(out)


class PromptStream:
    """Endless passes over n prompts, each in a fresh order; the state is the current order and the place in it."""

    def __init__(self, n: int, generator: torch.Generator) -> None:
        if n < 1:
            raise ValueError("a stream needs at least one prompt")
        self.n, self.generator = n, generator
        self.order: list[int] = []
        self.position = 0

    def take(self, k: int) -> list[int]:
        """The next k indices; a pass that ends within them is followed by the next."""
        out: list[int] = []
        while len(out) < k:
            if self.position >= len(self.order):
                self.order, self.position = epoch_order(self.n, self.generator), 0
            got = self.order[self.position : self.position + k - len(out)]
            self.position += len(got)
            out += got
        return out

    def state_dict(self) -> dict[str, Any]:
        """JSON-able; the generator's own state is saved beside it."""
        return {"n": self.n, "order": self.order, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises `ValueError` when the number of prompts has changed."""
        if state["n"] != self.n:
            raise ValueError(f"the stream was saved over {state['n']} prompts, now there are {self.n}")
        self.order, self.position = list(state["order"]), state["position"]
