"""Sampling responses to queries, with our own decode loop or with transformers' `generate`.

B = rows, T = response slots, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

from fastrlhf.errors import UserError, brief
from fastrlhf.models import hidden_states, packed_logprobs
from fastrlhf.rollout.decode import decode

__all__ = ["Generation", "check_generate", "generate"]


@dataclass(frozen=True, slots=True)
class Generation:
    """Responses in the order of the queries."""

    responses_BT: Tensor
    """int64; slots after the first EOS hold the EOS id and mean nothing."""
    logprobs_BT: Tensor
    """fp32 log-probability of each token under the tempered distribution it was drawn from; 0 after the end."""
    lengths_B: Tensor
    """int64: tokens kept, up to and including the first EOS."""
    has_eos_B: Tensor
    """bool."""


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    queries: Sequence[np.ndarray],
    *,
    response_length: int,
    temperature: float,
    eos_id: int,
    pad_id: int,
    generator: torch.Generator,
    engine: Literal["native", "hf"] = "native",
    rows_per_batch: int = 64,
    greedy: bool = False,
) -> Generation:
    """One response of up to `response_length` tokens to each query (arrays of ids, no padding).

    Logits are divided by `temperature` + 1e-7 (REFERENCE 1.3); `pad_id` is never drawn. All randomness comes from
    `generator`, on the CPU: one uniform number per row and slot in the order of the queries, so that a row's draw
    does not depend on how rows are batched. The model's training mode is restored, whatever happens.

    Raises `ValueError` for an empty query or a bad size, `RuntimeError` when logits are not finite.
    """
    for row, query in enumerate(queries):
        if len(query) == 0:
            raise ValueError(f"query {row} is empty: there is no position to predict from")
    if response_length < 1 or rows_per_batch < 1:
        raise ValueError(
            f"response_length ({response_length}) and rows_per_batch ({rows_per_batch}) must be at least 1"
        )
    B, T = len(queries), response_length
    uniforms_BT = None
    if not greedy and engine == "native":
        uniforms_BT = torch.rand(B, T, generator=generator)
    responses = torch.full((B, T), eos_id, device=model.device)
    logprobs = torch.zeros(B, T, device=model.device)
    lengths = torch.zeros(B, dtype=torch.int64, device=model.device)
    has_eos = torch.zeros(B, dtype=torch.bool, device=model.device)
    order = sorted(range(B), key=lambda b: len(queries[b]))
    training = model.training
    model.eval()
    try:
        for start in range(0, B, rows_per_batch):
            rows = order[start : start + rows_per_batch]
            batch = [np.asarray(queries[r]) for r in rows]
            settings: dict[str, Any] = {
                "response_length": T,
                "temperature": temperature + 1e-7,
                "eos_id": eos_id,
                "pad_id": pad_id,
            }
            if engine == "native":
                got = decode(model, batch, None if uniforms_BT is None else uniforms_BT[rows], **settings)
            else:
                seed = int(torch.randint(2**62, (), generator=generator))
                got = _hugging_face(model, batch, seed=None if greedy else seed, **settings)
            index = torch.tensor(rows, device=model.device)
            for out, part in zip((responses, logprobs, lengths, has_eos), got, strict=True):
                out[index] = part
    finally:
        model.train(training)
    return Generation(responses, logprobs, lengths, has_eos)


@torch.no_grad()
def check_generate(model: PreTrainedModel, engine: Literal["native", "hf"]) -> None:
    """Prove on two rows that sampling with a cache and padding gives the log-probabilities of a plain forward pass.

    Raises `UserError` for a family whose cache, mask or positions `engine` cannot drive: its responses would look
    sampled and come from another distribution.
    """
    config = model.config.get_text_config()
    # A local attention's window errs only in rows that are longer; those of thousands are transformers' own static
    # sliding layers, which tests hold against it.
    windows = [getattr(config, name, None) or 0 for name in ("sliding_window", "window_size")]
    longest = 6 + max((w for w in windows if isinstance(w, int) and w <= 512), default=0)
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and limit > 3:
        longest = min(longest, limit - 3)
    vocab = cast(Any, model.get_input_embeddings()).weight.shape[0]
    queries = [np.arange(n) * 37 % vocab for n in (longest, max(longest // 2, 1))]
    settings: dict[str, Any] = {"response_length": 3, "temperature": 1.0, "eos_id": vocab, "pad_id": vocab}
    refusal = f"rollout.engine: {engine} cannot sample from {type(model).__name__}"
    advice = "set rollout.engine: hf" if engine == "native" else "this family is not supported"
    training = model.training
    try:
        got = generate(model, queries, generator=torch.Generator(), engine=engine, greedy=True, **settings)
        model.eval()
        for row, query in enumerate(queries):
            response_T = got.responses_BT[row]
            ids_BL = torch.cat([torch.from_numpy(query).to(model.device), response_T])[None]
            hidden_BLD = hidden_states(model.base_model, ids_BL)
            positions_T = torch.arange(len(query) - 1, ids_BL.shape[1] - 1, device=model.device)
            error = (packed_logprobs(model, hidden_BLD, positions_T, response_T) - got.logprobs_BT[row]).abs().max()
            if not bool(error <= (1e-3 if model.dtype == torch.float32 else 0.2)):
                raise UserError(f"{refusal} (log-probabilities differ by {float(error):.2g}); {advice}")
    except UserError:
        raise
    except Exception as err:  # whatever a family's code raises when called in this way
        raise UserError(f"{refusal} ({brief(err)}); {advice}") from err
    finally:
        model.train(training)


def _hugging_face(
    model: PreTrainedModel,
    queries: Sequence[np.ndarray],
    *,
    seed: int | None,
    response_length: int,
    temperature: float,
    eos_id: int,
    pad_id: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The oracle: transformers' own loop. The global random state is used inside and restored."""
    L, device = max(len(q) for q in queries), model.device
    ids, mask = np.zeros((len(queries), L), dtype=np.int64), np.zeros((len(queries), L), dtype=np.int64)
    for b, query in enumerate(queries):
        ids[b, L - len(query) :], mask[b, L - len(query) :] = query, 1
    recorder = _Recorder(pad_id, temperature)
    sampling = {} if seed is None else {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    config = GenerationConfig(
        **sampling,
        max_new_tokens=response_length,
        eos_token_id=eos_id,
        pad_token_id=eos_id,  # what finished rows are filled with
    )
    own = model.generation_config
    # What the model's folder asks for (penalties, suppressed tokens) would fill in whatever `config` leaves open.
    model.generation_config = GenerationConfig()
    try:
        with torch.random.fork_rng():
            if seed is not None:
                torch.manual_seed(seed)
            sequences = cast(Any, model).generate(
                input_ids=torch.from_numpy(ids).to(device),
                attention_mask=torch.from_numpy(mask).to(device),
                generation_config=config,
                logits_processor=LogitsProcessorList([recorder]),
            )
    finally:
        model.generation_config = own
    return recorder.result(sequences[:, L:], response_length, eos_id)


class _Recorder:
    """A logits processor that blocks PAD and keeps the log-probability of each drawn token, not [B,T,V] scores."""

    def __init__(self, pad_id: int, temperature: float) -> None:
        self.pad_id, self.temperature = pad_id, temperature
        self.previous: Tensor | None = None
        self.logprobs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._settle(input_ids[:, -1])
        scores = scores.float()
        if self.pad_id < scores.shape[1]:
            scores = scores.index_fill(1, torch.tensor([self.pad_id], device=scores.device), -float("inf"))
        self.previous = scores
        return scores

    def _settle(self, tokens_B: Tensor) -> None:
        """Now that the token drawn from the kept logits is known, keep its log-probability only."""
        if self.previous is not None:
            logprobs_BV = torch.log_softmax(self.previous / self.temperature, -1)
            self.logprobs.append(logprobs_BV.gather(1, tokens_B[:, None])[:, 0])

    def result(self, responses_Bt: Tensor, response_length: int, eos_id: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        self._settle(responses_Bt[:, -1])
        t = responses_Bt.shape[1]
        responses = torch.nn.functional.pad(responses_Bt, (0, response_length - t), value=eos_id)
        is_eos = responses_Bt == eos_id
        has_eos = is_eos.any(1)
        lengths = torch.where(has_eos, is_eos.long().argmax(1) + 1, t)
        kept = torch.arange(response_length, device=responses.device) < lengths[:, None]
        logprobs = torch.nn.functional.pad(torch.stack(self.logprobs, 1), (0, response_length - t))
        return responses, torch.where(kept, logprobs, 0.0), lengths, has_eos
