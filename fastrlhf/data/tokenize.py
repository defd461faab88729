"""Tokenizers, and rows as token arrays: int32, no padding anywhere."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from fastrlhf.config import DataConfig
from fastrlhf.data.sources import Row, Text
from fastrlhf.data.tldr import build_query, format_query, summary_text
from fastrlhf.errors import UserError, brief

__all__ = [
    "PreferenceExample",
    "PromptExample",
    "SFTExample",
    "TokenizeReport",
    "load_tokenizer",
    "tokenize_preferences",
    "tokenize_prompts",
    "tokenize_sft",
    "train_tokenizer",
    "training_texts",
]

EOS, PAD = "<|endoftext|>", "[PAD]"


@dataclass(frozen=True, slots=True)
class SFTExample:
    query: np.ndarray
    response: np.ndarray
    """Ends with EOS unless it was cut."""


@dataclass(frozen=True, slots=True)
class PreferenceExample:
    query: np.ndarray
    chosen: np.ndarray
    rejected: np.ndarray


@dataclass(frozen=True, slots=True)
class PromptExample:
    query: np.ndarray
    text: str
    """The prompt as the tokens say it, after any cut."""


@dataclass(slots=True)
class TokenizeReport:
    """How many rows there were, and how many had to be cut to the lengths of the configuration."""

    rows: int = 0
    cut_queries: int = 0
    cut_responses: int = 0

    def cuts(self) -> dict[str, int]:
        return {"queries": self.cut_queries, "responses": self.cut_responses}


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """A fast tokenizer with an EOS, and a PAD that is not the EOS.

    A missing PAD is added as `[PAD]` after the other ids; models are not resized, since PAD is never embedded
    (REFERENCE item 3). Raises `UserError` when it cannot be loaded or has no EOS.
    """
    if (path.startswith((".", "/", "~")) or Path(path).exists()) and not any(Path(path).glob("tokenizer*")):
        raise UserError(f"model.tokenizer: {path} holds no tokenizer (no tokenizer.json)")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as err:  # transformers and tokenizers check a folder with whatever they have at hand
        raise UserError(f"model.tokenizer: cannot load a tokenizer from {path} ({brief(err)})") from err
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"model.tokenizer: the tokenizer in {path} has no EOS token; set eos_token in its tokenizer_config.json"
        )
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        tokenizer.add_special_tokens({"pad_token": PAD})
    return tokenizer


def train_tokenizer(texts: Iterable[str], vocab_size: int, folder: Path) -> None:
    """A byte-level BPE of `vocab_size` ids, EOS at 0, and `[PAD]` after them; saved as a Hugging Face folder."""
    if vocab_size < 257:
        raise UserError(f"model.train_tokenizer is {vocab_size}; a byte-level BPE needs at least 257 ids")
    # The trainer takes time quadratic in a word's length, and no merge of worth is as long.
    texts = (re.sub(r"\S{256}", r"\g<0> ", text) for text in texts)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=EOS, bos_token=EOS, unk_token=EOS)
    tokenizer.add_special_tokens({"pad_token": PAD})
    tokenizer.save_pretrained(folder)


def training_texts(rows: Sequence[Row]) -> Iterable[str]:
    """The raw texts of SFT rows, to train a tokenizer on."""
    for row in rows:
        for part in (row.prompt if row.tldr is None else format_query(row.tldr), row.completion):
            if isinstance(part, str):
                yield summary_text(part) if row.tldr is not None and part is row.completion else part
            else:
                yield from (m["content"] for m in part or [])


# --- rows to tokens


def tokenize_sft(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, data: DataConfig
) -> tuple[list[SFTExample], TokenizeReport]:
    """Queries of at most `max_query_length`, responses of at most `max_response_length`, EOS included."""
    report = TokenizeReport(len(rows))
    queries, _ = _queries(rows, tokenizer, data, report)
    responses = _responses(rows, [r.completion for r in rows], tokenizer, data.max_response_length, report)
    return [SFTExample(q, r) for q, r in zip(queries, responses, strict=True)], report


def tokenize_preferences(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, data: DataConfig
) -> tuple[list[PreferenceExample], TokenizeReport]:
    """Queries of at most `max_query_length`, both sides of at most `max_preference_length`, EOS included."""
    report = TokenizeReport(len(rows))
    queries, _ = _queries(rows, tokenizer, data, report)
    length = data.max_preference_length
    chosen = _responses(rows, [r.chosen for r in rows], tokenizer, length, report)
    rejected = _responses(rows, [r.rejected for r in rows], tokenizer, length, report)
    return [PreferenceExample(*parts) for parts in zip(queries, chosen, rejected, strict=True)], report


def tokenize_prompts(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, data: DataConfig
) -> tuple[list[PromptExample], TokenizeReport]:
    """Queries of at most `max_query_length`, with their text."""
    report = TokenizeReport(len(rows))
    queries, texts = _queries(rows, tokenizer, data, report)
    return [PromptExample(q, t) for q, t in zip(queries, texts, strict=True)], report


def _queries(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, data: DataConfig, report: TokenizeReport
) -> tuple[list[np.ndarray], list[str]]:
    limit = data.max_query_length
    if limit < 1:
        raise UserError(f"data.max_query_length is {limit}; it must be at least 1")
    texts = [format_query(r.tldr) if r.tldr is not None else _rendered_prompt(r, tokenizer) for r in rows]
    encoded = _encode(texts, tokenizer)
    out = []
    for i, (row, ids) in enumerate(zip(rows, encoded, strict=True)):
        if len(ids) > limit:
            report.cut_queries += 1
            if row.tldr is not None:
                ids, _ = build_query(row.tldr, tokenizer, max_length=limit, where=row.where)
            else:
                ids = ids[-limit:]
            texts[i] = cast(str, tokenizer.decode(ids, skip_special_tokens=True))
        if not ids:
            raise UserError(
                f"the prompt of {row.where} has no tokens, so there is no position to predict from; remove it"
            )
        out.append(_array(ids, tokenizer, row.where))
    return out, texts


def _responses(
    rows: Sequence[Row],
    parts: Sequence[Text | None],
    tokenizer: PreTrainedTokenizerBase,
    limit: int,
    report: TokenizeReport,
) -> list[np.ndarray]:
    if limit < 1:
        raise UserError(f"the longest response is set to {limit} tokens; it must be at least 1")
    texts = [_rendered_response(r, cast(Text, p), tokenizer) for r, p in zip(rows, parts, strict=True)]
    out = []
    for row, ids in zip(rows, _encode(texts, tokenizer), strict=True):
        if not ids or ids[-1] != tokenizer.eos_token_id:
            ids = [*ids, tokenizer.eos_token_id]
        if len(ids) > limit:
            report.cut_responses += 1
            ids = ids[:limit]
        out.append(_array(ids, tokenizer, row.where))
    return out


def _encode(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    # No special tokens are added: a BOS or EOS that a tokenizer puts around every text would sit inside the row.
    return tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []


def _array(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, where: str) -> np.ndarray:
    array = np.asarray(ids, dtype=np.int32)
    if (array == tokenizer.pad_token_id).any():
        raise UserError(f"{where} contains the padding token {tokenizer.pad_token!r}, which no model embeds; remove it")
    return array


def _rendered_prompt(row: Row, tokenizer: PreTrainedTokenizerBase) -> str:
    if isinstance(row.prompt, str):
        return row.prompt
    return _template(row, row.prompt, tokenizer, add_generation_prompt=True)


def _rendered_response(row: Row, part: Text, tokenizer: PreTrainedTokenizerBase) -> str:
    if isinstance(part, str):
        return summary_text(part) if row.tldr is not None else part
    if not isinstance(row.prompt, list):
        raise UserError(f"{row.where} has a chat response to a text prompt; give both as text or both as messages")
    prompt = _template(row, row.prompt, tokenizer, add_generation_prompt=True)
    whole = _template(row, [*row.prompt, *part], tokenizer, add_generation_prompt=False)
    if not whole.startswith(prompt):
        raise UserError(
            f"{row.where}: the tokenizer's chat template renders the prompt differently with a response after it"
        )
    return whole[len(prompt) :].rstrip("\n")


def _template(row: Row, messages: Any, tokenizer: PreTrainedTokenizerBase, *, add_generation_prompt: bool) -> str:
    if tokenizer.chat_template is None:
        raise UserError(
            f"{row.where} holds chat messages, but the tokenizer has no chat template; use a chat model's tokenizer"
        )
    import jinja2

    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    except (jinja2.TemplateError, TypeError) as err:
        raise UserError(f"{row.where}: the tokenizer's chat template refuses the messages ({err})") from err
    return cast(str, text)
