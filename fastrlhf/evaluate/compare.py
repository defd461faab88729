"""Policies on held-out prompts: one measured alone, or PPO's beside the SFT policy it started from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fastrlhf.checkpoint import named_generator
from fastrlhf.config import Config
from fastrlhf.data import prepare as data
from fastrlhf.data.batching import micro_batches
from fastrlhf.evaluate.sampling import Samples, sample, sampled_kl
from fastrlhf.evaluate.text import distinct_n, rouge_l, win_rate
from fastrlhf.loading import load_ready, load_reward, score_function
from fastrlhf.reward import rewards
from fastrlhf.run_folder import RunFolder

__all__ = ["Judge", "compare", "measure"]

Judge = Callable[[list[str], list[str], list[bool]], list[float]]
"""(prompts, responses, ended) -> one score each: a measure of quality that no model was trained on."""


def _draw(
    cfg: Config, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: data.Heldout, name: str
) -> tuple[Samples, dict[str, Any]]:
    generator = named_generator(cfg.seed, f"evaluate/{name}")
    got = sample(policy, tokenizer, prompts.queries, cfg, temperature=cfg.evaluate.temperature, generator=generator)
    facts: dict[str, Any] = {
        "distinct_2": distinct_n(got.texts),
        "response_length": sum(map(len, got.rollout.responses)) / len(got.texts),
        "ended": sum(got.ended) / len(got.ended),
    }
    if prompts.references is not None:
        facts["rougeL"] = rouge_l(prompts.references, got.texts)
    return got, facts


def measure(
    cfg: Config, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: data.Heldout, name: str
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """ROUGE-L where references are known, distinct-2, lengths, and the mean score where a reward is configured;
    and the responses as rows."""
    got, facts = _draw(cfg, policy, tokenizer, prompts, name)
    rows: list[dict[str, Any]] = [
        {"prompt": p, "response": t, "ended": e} for p, t, e in zip(prompts.texts, got.texts, got.ended, strict=True)
    ]
    if cfg.ppo.reward_model or cfg.ppo.reward_function:
        scores = _scores(cfg, policy, tokenizer, got, prompts)
        facts["score"] = sum(scores) / len(scores)
        rows = [{**row, "score": s} for row, s in zip(rows, scores, strict=True)]
    return {"rows": len(rows), **facts}, rows


def compare(cfg: Config, run: RunFolder, judge: Judge | None = None) -> dict[str, Any]:
    """The SFT and PPO policies of a run on the same held-out prompts; writes evaluation.jsonl."""
    tokenizer = data.load_tokenizer_of(cfg)
    prompts = data.heldout_prompts(cfg, tokenizer)
    policies = {name: load_ready(str(run.path / name / "model"), cfg).eval() for name in ("sft", "ppo")}
    summary: dict[str, Any] = {}
    samples: dict[str, Samples] = {}
    judged: dict[str, dict[str, list[float]]] = {"reward": {}, "gold": {}}
    for name, policy in policies.items():
        samples[name], summary[name] = got, _ = _draw(cfg, policy, tokenizer, prompts, name)
        judged["reward"][name] = _scores(cfg, policy, tokenizer, got, prompts)
        if judge is not None:
            judged["gold"][name] = judge(prompts.texts, got.texts, got.ended)
    summary["ppo"]["kl"] = sampled_kl(
        policies["ppo"], policies["sft"], samples["ppo"].rollout, cfg, temperature=cfg.evaluate.temperature
    )
    for kind, values in judged.items():
        if values:
            summary["ppo"][f"{kind}_score_sft"] = sum(values["sft"]) / len(values["sft"])
            summary["ppo"][f"{kind}_score_ppo"] = sum(values["ppo"]) / len(values["ppo"])
            summary["ppo"][f"{kind}_win_rate_vs_sft"] = win_rate(values["ppo"], values["sft"])
    rows = []
    for i, prompt in enumerate(prompts.texts):
        row: dict[str, Any] = {"prompt": prompt, "sft": samples["sft"].texts[i], "ppo": samples["ppo"].texts[i]}
        for kind, values in judged.items():
            row |= {f"{kind}_{name}": scores[i] for name, scores in values.items()}
        rows.append(row)
    data.write_jsonl(run.path / "evaluation.jsonl", rows)
    return {**summary, "samples": rows[:3], "rows": len(rows)}


@torch.no_grad()
def _scores(
    cfg: Config, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, got: Samples, prompts: data.Heldout
) -> list[float]:
    """The training reward of each sample, with the EOS rule."""
    function = score_function(cfg)
    if function is not None:
        values = torch.tensor(function(prompts.texts, got.texts))
    else:
        model = load_reward(cfg, tokenizer)
        rows = [np.concatenate([q, r]) for q, r in zip(got.rollout.queries, got.rollout.responses, strict=True)]
        values = torch.zeros(len(rows))
        for group in micro_batches([len(r) for r in rows], cfg.batch.tokens_per_forward):
            values[group] = rewards(model, [rows[i] for i in group]).cpu()
    if cfg.ppo.missing_eos_score is not None:
        values = torch.where(got.rollout.has_eos_B.cpu(), values, torch.tensor(cfg.ppo.missing_eos_score))
    return values.tolist()
