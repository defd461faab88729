"""From a configuration to tokenised examples: what each stage trains on and what is held out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fastrlhf.config import Config
from fastrlhf.data.sources import Row, is_local, load_rows, split_heldout
from fastrlhf.data.tokenize import (
    PreferenceExample,
    PromptExample,
    SFTExample,
    TokenizeReport,
    load_tokenizer,
    tokenize_preferences,
    tokenize_prompts,
    tokenize_sft,
    train_tokenizer,
    training_texts,
)
from fastrlhf.errors import UserError
from fastrlhf.run_folder import save_whole

__all__ = [
    "Heldout",
    "Split",
    "check_later_stages",
    "check_positions",
    "check_preference_positions",
    "check_prompt_positions",
    "check_same_tokenizer",
    "check_vocabulary",
    "heldout_prompts",
    "load_tokenizer_of",
    "preference_examples",
    "prompt_examples",
    "read",
    "sft_examples",
    "tokenizer_for",
    "vocab_size",
    "write_jsonl",
]

Kind = Literal["sft", "preferences", "prompts"]


@dataclass(frozen=True, slots=True)
class Split:
    """Rows of one kind, in the order of their source."""

    train: list[Row]
    heldout: list[Row]


def read(cfg: Config, kind: Kind) -> Split:
    """The rows of one kind, with those that are held out.

    Raises `UserError` for anything wrong with the source.
    """
    data = cfg.data
    source, field = getattr(data, kind), f"data.{kind}"
    heldout, heldout_field = getattr(data, f"{kind}_eval"), f"data.{kind}_eval"
    if kind == "prompts" and source is None:
        source, field = data.sft, "data.sft"
        if heldout is None:
            heldout, heldout_field = data.sft_eval, "data.sft_eval"
    if source is None:
        raise UserError(f"{field} is not set; name a hub id or a .jsonl, .parquet or .csv file")
    rows = load_rows(source, kind=kind, split=data.train_split, field=field)
    if heldout is not None:
        split = data.eval_split or data.train_split
        return Split(rows, load_rows(heldout, kind=kind, split=split, field=heldout_field))
    if data.eval_split is not None and not is_local(source):
        return Split(rows, load_rows(source, kind=kind, split=data.eval_split, field=field))
    train, held = split_heldout(rows, data.eval_fraction)
    return Split(train, held)


def tokenizer_for(cfg: Config, rows: Split, folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of the SFT stage: loaded, or trained on its rows into `folder`."""
    if cfg.model.tokenizer is None and cfg.model.train_tokenizer is not None:
        if not folder.is_dir():
            size = cfg.model.train_tokenizer
            save_whole(folder, lambda tmp: train_tokenizer(training_texts(rows.train), size, tmp))
            got = vocab_size(load_tokenizer(str(folder)))
            if got < size:
                print(f"model.train_tokenizer: the texts of data.sft give {got:,} ids, not {size:,}", flush=True)
        return load_tokenizer(str(folder), trust_remote_code=False)
    return load_tokenizer_of(cfg)


def load_tokenizer_of(cfg: Config) -> PreTrainedTokenizerBase:
    path = cfg.model.tokenizer or cfg.model.path
    if path is None:
        raise UserError("model.tokenizer is not set and there is no model.path to take it from")
    return load_tokenizer(path, trust_remote_code=cfg.model.trust_remote_code)


def _say(what: str, report: TokenizeReport) -> None:
    cuts = [f"{n:,} {name} cut" for name, n in report.cuts().items() if n]
    print(f"{what}: {report.rows:,} rows" + (f" ({', '.join(cuts)})" if cuts else ""), flush=True)


def sft_examples(
    cfg: Config, rows: Split, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[SFTExample], list[SFTExample]]:
    """Training and held-out examples, with a line about rows that had to be cut."""
    train, report = tokenize_sft(rows.train, tokenizer, cfg.data)
    _say("data.sft", report)
    return train, tokenize_sft(rows.heldout, tokenizer, cfg.data)[0]


def preference_examples(
    cfg: Config, rows: Split, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[PreferenceExample], list[PreferenceExample]]:
    train, report = tokenize_preferences(rows.train, tokenizer, cfg.data)
    _say("data.preferences", report)
    equal = sum(np.array_equal(e.chosen, e.rejected) for e in train)
    if equal:
        print(f"data.preferences: {equal:,} pairs have the same tokens on both sides and teach nothing", flush=True)
    return train, tokenize_preferences(rows.heldout, tokenizer, cfg.data)[0]


def prompt_examples(
    cfg: Config, rows: Split, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[PromptExample], list[PromptExample]]:
    train, report = tokenize_prompts(rows.train, tokenizer, cfg.data)
    _say("data.prompts", report)
    return train, tokenize_prompts(rows.heldout, tokenizer, cfg.data)[0]


@dataclass(frozen=True, slots=True)
class Heldout:
    """Held-out prompts, and their references where the data has them."""

    queries: list[np.ndarray]
    texts: list[str]
    references: list[str] | None


def heldout_prompts(cfg: Config, tokenizer: PreTrainedTokenizerBase) -> Heldout:
    """Up to `evaluate.rows` held-out prompts; from `data.sft`, whose references are then known, unless
    `data.prompts` is given."""
    if cfg.data.prompts is None and cfg.data.sft is not None:
        rows = read(cfg, "sft").heldout[: cfg.evaluate.rows]
        examples, _ = tokenize_sft(rows, tokenizer, cfg.data)
        prompts, _ = tokenize_prompts(rows, tokenizer, cfg.data)
        references = tokenizer.batch_decode([e.response.tolist() for e in examples], skip_special_tokens=True)
        return Heldout([p.query for p in prompts], [p.text for p in prompts], references)
    rows = read(cfg, "prompts").heldout[: cfg.evaluate.rows]
    prompts, _ = tokenize_prompts(rows, tokenizer, cfg.data)
    return Heldout([p.query for p in prompts], [p.text for p in prompts], None)


def vocab_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """Ids a model must embed: all but a [PAD] that was added after the others, which is never fed."""
    size = max(tokenizer.get_vocab().values()) + 1
    return size - 1 if tokenizer.pad_token_id == size - 1 else size


def check_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer with more ids than the model embeds."""
    have = cast(nn.Embedding, model.get_input_embeddings()).weight.shape[0]
    if vocab_size(tokenizer) > have:
        raise UserError(
            f"model.tokenizer has {vocab_size(tokenizer)} ids, but the model embeds {have}; "
            "use the model's own tokenizer"
        )


def check_positions(model: PreTrainedModel, longest: int, field: str, name: str = "the model") -> None:
    """Refuse rows that run past the model's last position. `longest` in tokens; `field` limits the response's share."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and longest > limit:
        raise UserError(
            f"data.max_query_length: the longest query and response have {longest} tokens, but {name} ends at "
            f"{limit}; lower data.max_query_length or {field} by {longest - limit}"
        )


def check_preference_positions(model: PreTrainedModel, examples: Sequence[PreferenceExample]) -> None:
    """`check_positions` for pairs."""
    longest = max(len(e.query) + max(len(e.chosen), len(e.rejected)) for e in examples)
    check_positions(model, longest, "data.max_preference_length")


def check_prompt_positions(
    model: PreTrainedModel, examples: Sequence[PromptExample], cfg: Config, name: str = "the model"
) -> None:
    """`check_positions` for prompts and the responses that will be sampled."""
    longest = max(len(p.query) for p in examples) + cfg.rollout.response_length
    check_positions(model, longest, "rollout.response_length", name)


def check_later_stages(
    cfg: Config, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, learns_reward: bool
) -> None:
    """What the stages after SFT would refuse about the lengths of their rows and about the reward model's tokenizer."""
    if learns_reward:
        rows = read(cfg, "preferences")
        check_preference_positions(policy, tokenize_preferences([*rows.train, *rows.heldout], tokenizer, cfg.data)[0])
    rows = read(cfg, "prompts")
    check_prompt_positions(policy, tokenize_prompts([*rows.train, *rows.heldout], tokenizer, cfg.data)[0], cfg)
    if cfg.ppo.reward_model:
        check_same_tokenizer(cfg.ppo.reward_model, tokenizer, cfg)


def check_same_tokenizer(path: str, tokenizer: PreTrainedTokenizerBase, cfg: Config) -> None:
    """Refuse a reward model that reads token ids differently from the policy."""
    other = load_tokenizer(path, trust_remote_code=cfg.model.trust_remote_code)
    if other.get_vocab() != tokenizer.get_vocab() or other.eos_token_id != tokenizer.eos_token_id:
        raise UserError(
            f"ppo.reward_model: {path} has another tokenizer than the policy ({len(other)} and {len(tokenizer)} ids); "
            "train the reward model from the same SFT model, or give ppo.reward_function"
        )


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
