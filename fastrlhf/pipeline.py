"""The stages, each on its own or in a row: load, train, save, evaluate.

A run folder holds `sft/model`, `reward/model` and `ppo/model` when the stages are done; `<stage>/done.json` marks
a stage as finished, so that `--resume` skips it.
"""

from __future__ import annotations

import copy
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from fastrlhf.checkpoint import named_generator
from fastrlhf.config import BatchSizes, Config, check_values
from fastrlhf.config_parser import config_to_yaml
from fastrlhf.data import prepare as data
from fastrlhf.errors import UserError
from fastrlhf.evaluate.compare import Judge, compare, measure
from fastrlhf.loading import load_ready, load_reward, score_function, set_token_budgets
from fastrlhf.metrics import require_packages
from fastrlhf.models import (
    check_head,
    check_shape,
    frozen_copy,
    move,
    policy_from_config,
    require_folder,
    scalar_from_policy,
)
from fastrlhf.ppo import PPOModels
from fastrlhf.ppo_loop import train_ppo
from fastrlhf.reward import accuracy, normalize, train_reward
from fastrlhf.rollout import check_generate
from fastrlhf.run_folder import RunFolder, atomic_write_text, disk_errors, save_whole
from fastrlhf.scoring import load_reward_function
from fastrlhf.sft import evaluate_sft, train_sft

__all__ = [
    "StageResult",
    "check",
    "pipeline_in",
    "print_summary",
    "resolve",
    "run_evaluate",
    "run_pipeline",
    "run_ppo",
    "run_reward",
    "run_sft",
    "stages_of",
]


@dataclass(frozen=True, slots=True)
class StageResult:
    """What a stage leaves behind."""

    run: Path
    model: Path
    metrics: dict[str, Any]


def run_sft(cfg: Config) -> StageResult:
    """Fine-tune `cfg.model` on `cfg.data.sft`. Raises `UserError` for bad input, `Interrupted` after a signal."""
    return _alone(cfg, "sft", _sft)


def run_reward(cfg: Config) -> StageResult:
    """Train a reward model from the SFT model at `cfg.model.path` on `cfg.data.preferences`."""
    return _alone(cfg, "reward", _reward)


def run_ppo(cfg: Config) -> StageResult:
    """PPO from the SFT model at `cfg.model.path` against `cfg.ppo.reward_model` or `cfg.ppo.reward_function`."""
    return _alone(cfg, "ppo", _ppo)


def _alone(cfg: Config, name: str, work: Callable[[Config, RunFolder], dict[str, Any]]) -> StageResult:
    cfg = copy.deepcopy(cfg)
    check(cfg, (name,))
    with _open_run(cfg, name) as run:
        metrics = _stage(cfg, run, name, work)
        summary = {"rm" if name == "reward" else name: metrics, "seed": cfg.seed, "run": str(run.path)}
        _write_summary(run, summary)
        return StageResult(run.path, run.path / name / "model", metrics)


def run_pipeline(cfg: Config) -> dict[str, Any]:
    """SFT, reward model (unless `cfg.ppo.reward_model` or `reward_function` is given), PPO, evaluation.

    Returns the summary that is also written to `summary.json`. Raises `UserError` for bad input and `Interrupted`
    after a signal.
    """
    cfg = copy.deepcopy(cfg)
    check(cfg, stages_of(cfg))
    with _open_run(cfg, "run") as run:
        return pipeline_in(run, cfg)


def stages_of(cfg: Config) -> tuple[str, ...]:
    """The stages of a whole run: one trains the reward unless it is given."""
    learns_reward = cfg.ppo.reward_model is None and cfg.ppo.reward_function is None
    return ("sft", "reward", "ppo") if learns_reward else ("sft", "ppo")


def pipeline_in(run: RunFolder, cfg: Config, *, judge: Judge | None = None) -> dict[str, Any]:
    """`run_pipeline` with a configuration that passed `check`, in a folder that is already open. `judge` measures the
    held-out responses beside the reward."""
    stages = stages_of(cfg)
    after_sft = copy.deepcopy(cfg)
    after_sft.model.path = str(run.path / "sft" / "model")
    after_sft.model.tokenizer = after_sft.model.from_scratch = after_sft.model.train_tokenizer = None
    done = {"sft": _stage(cfg, run, "sft", partial(_sft, later=stages[1:]))}
    if "reward" in stages:
        done["reward"] = _stage(after_sft, run, "reward", _reward)
        after_sft.ppo.reward_model = str(run.path / "reward" / "model")
    done["ppo"] = _stage(after_sft, run, "ppo", _ppo)
    began = time.perf_counter()
    with disk_errors(run.path):
        summary = compare(after_sft, run, judge)
    seconds = {name: metrics.pop("seconds") for name, metrics in done.items()}
    seconds["evaluate"] = time.perf_counter() - began
    summary["sft"] |= done["sft"]
    if "reward" in done:
        summary = {"sft": summary.pop("sft"), "rm": done["reward"], **summary}
    summary["ppo"] |= {k: v for k, v in done["ppo"].items() if k.startswith("objective/")}
    summary["seconds"] = {k: round(v, 1) for k, v in seconds.items()} | {"total": round(sum(seconds.values()), 1)}
    summary["seed"], summary["run"] = cfg.seed, str(run.path)
    _write_summary(run, summary)
    return summary


def _open_run(cfg: Config, command: str) -> RunFolder:
    return RunFolder.open(cfg, command, config_yaml=config_to_yaml(cfg))


def _write_summary(run: RunFolder, summary: dict[str, Any]) -> None:
    atomic_write_text(run.path / "summary.json", json.dumps(summary, indent=2, default=str) + "\n")


def resolve(cfg: Config) -> None:
    """Check every value, and fill in those that follow from others: what a run folder's config.yaml holds."""
    check_values(cfg)
    set_token_budgets(cfg)
    if cfg.ppo.preset == "reference":
        cfg.ppo.loss_reduction, cfg.ppo.old_logprobs, cfg.ppo.whiten_scope = "microbatch", "sampler", "rank"


def check(cfg: Config, stages: tuple[str, ...]) -> None:
    """Everything that can be refused before a model or data set is read; prints PPO's batch arithmetic."""
    resolve(cfg)
    disable_progress_bar()  # of loading weights: it would run into our own
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but distributed.strategy: none runs one process; "
            "start it without a launcher"
        )
    require_packages(cfg.log)
    for field, path in (("model.path", cfg.model.path), ("ppo.reward_model", cfg.ppo.reward_model)):
        if path is not None:
            require_folder(path, field)
    needed = {"sft": ("sft", cfg.data.sft), "reward": ("preferences", cfg.data.preferences)}
    for stage in stages:
        field, value = needed.get(stage, ("prompts", cfg.data.prompts or cfg.data.sft))
        if value is None:
            raise UserError(f"data.{field} is not set; name a hub id or a .jsonl, .parquet or .csv file")
    model = cfg.model
    if stages[0] == "sft":
        if model.path is None and model.from_scratch is None:
            raise UserError("model.path is not set; name a model folder or hub id, or give model.from_scratch")
        # A later stage takes its model from `path` alone; here one of the two would be left aside without a word.
        for one, two in (("path", "from_scratch"), ("path", "train_tokenizer"), ("tokenizer", "train_tokenizer")):
            if getattr(model, one) is not None and getattr(model, two) is not None:
                raise UserError(f"model.{one} and model.{two} are both set; keep one")
        if model.path is None and model.tokenizer is None and model.train_tokenizer is None:
            raise UserError("model.from_scratch needs a tokenizer; set model.tokenizer or model.train_tokenizer")
        if model.from_scratch is not None:
            check_shape(model.from_scratch)
    elif model.path is None:
        raise UserError(f"model.path is not set; {stages[0]} needs an SFT model's folder or hub id")
    if "reward" in stages and cfg.reward.normalize and cfg.data.sft is None:
        raise UserError("reward.normalize needs data.sft, whose references average 0; set it or reward.normalize false")
    if "ppo" in stages:
        if cfg.batch.micro_batch_size is not None and cfg.ppo.loss_reduction == "minibatch":
            raise UserError(
                "batch.micro_batch_size belongs to ppo.loss_reduction: microbatch; set that, or limit memory by "
                "batch.tokens_per_micro_batch"
            )
        if cfg.ppo.reward_model and cfg.ppo.reward_function:
            raise UserError("ppo.reward_model and ppo.reward_function are both set; keep one")
        if stages == ("ppo",) and not (cfg.ppo.reward_model or cfg.ppo.reward_function):
            raise UserError("ppo needs a reward: set ppo.reward_model or ppo.reward_function")
        if cfg.ppo.reward_function:
            load_reward_function(cfg.ppo.reward_function)
        if cfg.ppo.record_rollouts and cfg.model.dtype != "float32":
            raise UserError("ppo.record_rollouts needs model.dtype float32, which is what a replay computes in")
        sizes = BatchSizes.derive(cfg)
        if cfg.ppo.preset == "reference":
            print(
                "ppo: preset reference: loss_reduction microbatch, old_logprobs sampler, whiten_scope rank", flush=True
            )
        print(
            f"ppo: {sizes.episodes:,} episodes = {sizes.updates:,} updates x {cfg.batch.prompts_per_update:,} prompts; "
            f"{cfg.ppo.epochs} epochs x {cfg.batch.minibatches} minibatches of {sizes.minibatch:,} rows; "
            f"{sizes.optimizer_steps:,} optimiser steps",
            flush=True,
        )


def _stage(
    cfg: Config, run: RunFolder, name: str, work: Callable[[Config, RunFolder], dict[str, Any]]
) -> dict[str, Any]:
    done = run.path / name / "done.json"
    with disk_errors(done):
        if done.exists():
            print(f"{name}: already done", flush=True)
            return _finished(done, name)
    began = time.perf_counter()
    with disk_errors(run.path / name):
        metrics = work(cfg, run.stage(name))
    metrics["seconds"] = time.perf_counter() - began
    atomic_write_text(done, json.dumps(metrics, indent=2) + "\n")
    return metrics


def _finished(done: Path, name: str) -> dict[str, Any]:
    try:
        metrics = dict(json.loads(done.read_text(encoding="utf-8")))
        float(metrics["seconds"])
        return metrics
    except (ValueError, TypeError, KeyError, IsADirectoryError) as err:
        raise UserError(f"resume: {done} is damaged; remove it to run {name} from its last checkpoint") from err


def _save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """An ordinary Hugging Face folder, complete or not there at all."""
    save_whole(folder, model.save_pretrained, tokenizer.save_pretrained)


# --- the stages


def _sft(cfg: Config, run: RunFolder, *, later: tuple[str, ...] = ()) -> dict[str, Any]:
    rows = data.read(cfg, "sft")
    tokenizer = data.tokenizer_for(cfg, rows, run.path / "tokenizer")
    train, heldout = data.sft_examples(cfg, rows, tokenizer)
    if cfg.model.path is not None:
        policy = load_ready(cfg.model.path, cfg)
    else:
        seed = int(torch.randint(2**31, (), generator=named_generator(cfg.seed, "model/init")))
        policy = policy_from_config(
            cfg.model.from_scratch or {},
            vocab_size=data.vocab_size(tokenizer),
            eos_id=tokenizer.eos_token_id,
            dtype=cfg.model.dtype,
            attn=cfg.attn,
            seed=seed,
        )
        policy = move(policy, cfg.model.device)
        check_head(policy, "model.from_scratch")
    data.check_vocabulary(policy, tokenizer)
    longest = max(len(e.query) + len(e.response) for e in [*train, *heldout])
    data.check_positions(policy, longest, "data.max_response_length")
    if "ppo" in later:
        check_generate(policy, cfg.rollout.engine)
    if later:  # what they would refuse is refused before this stage has trained for hours
        data.check_later_stages(cfg, policy, tokenizer, learns_reward="reward" in later)
    before = evaluate_sft(policy, heldout[: cfg.sft.eval_rows], cfg) if cfg.sft.eval_rows else None
    metrics: dict[str, Any] = dict(train_sft(policy, train, cfg, run))
    if before is not None:
        metrics["eval_loss_before"] = before
        metrics["eval_loss"] = evaluate_sft(policy, heldout[: cfg.sft.eval_rows], cfg)
    _save_model(policy, tokenizer, run.path / "model")
    return metrics


def _reward(cfg: Config, run: RunFolder) -> dict[str, Any]:
    tokenizer = data.load_tokenizer_of(cfg)
    train, heldout = data.preference_examples(cfg, data.read(cfg, "preferences"), tokenizer)
    references = data.sft_examples(cfg, data.read(cfg, "sft"), tokenizer)[0] if cfg.reward.normalize else []
    policy = load_ready(str(cfg.model.path), cfg)
    data.check_vocabulary(policy, tokenizer)
    data.check_preference_positions(policy, [*train, *heldout])
    model = scalar_from_policy(policy, generator=named_generator(cfg.seed, "reward/head"))
    del policy
    metrics: dict[str, Any] = dict(train_reward(model, train, cfg, run))
    if cfg.reward.normalize:
        metrics["bias"] = normalize(model, references, cfg)
    if cfg.reward.eval_rows:
        judged = heldout[: cfg.reward.eval_rows]
        metrics["accuracy"] = accuracy(model, judged, cfg)
        metrics["accuracy_train"] = accuracy(model, train[: len(judged)], cfg)
    _save_model(model, tokenizer, run.path / "model")
    return metrics


def _ppo(cfg: Config, run: RunFolder) -> dict[str, Any]:
    tokenizer = data.load_tokenizer_of(cfg)
    prompts, _ = data.prompt_examples(cfg, data.read(cfg, "prompts"), tokenizer)
    policy = load_ready(str(cfg.model.path), cfg)
    check_generate(policy, cfg.rollout.engine)
    data.check_vocabulary(policy, tokenizer)
    data.check_prompt_positions(policy, prompts, cfg)
    reward_model = load_reward(cfg, tokenizer) if cfg.ppo.reward_model else None
    if reward_model is not None:
        data.check_prompt_positions(cast(PreTrainedModel, reward_model.lm_backbone), prompts, cfg, "the reward model")
        # The critic starts from the trained reward model, head and bias included (REFERENCE item 22).
        critic = copy.deepcopy(reward_model).requires_grad_(True)
    else:
        critic = scalar_from_policy(policy, generator=named_generator(cfg.seed, "ppo/critic_head"))
    models = PPOModels(policy=policy, ref_policy=frozen_copy(policy), critic=critic, reward_model=reward_model)
    metrics = train_ppo(models, tokenizer, prompts, cfg, run, score_function(cfg))
    _save_model(critic, tokenizer, run.path / "critic")
    _save_model(policy, tokenizer, run.path / "model")
    if cfg.ppo.record_rollouts:
        print(f"ppo: recordings in {run.path / 'recordings'}; see fastrlhf replay", flush=True)
    return dict(metrics)


def run_evaluate(cfg: Config) -> dict[str, Any]:
    """Sample the policy at `cfg.model.path` on held-out prompts; writes summary.json and samples.jsonl."""
    cfg = copy.deepcopy(cfg)
    check(cfg, ("evaluate",))
    with _open_run(cfg, "evaluate") as run:
        tokenizer = data.load_tokenizer_of(cfg)
        policy = load_ready(str(cfg.model.path), cfg)
        check_generate(policy, cfg.rollout.engine)
        prompts = data.heldout_prompts(cfg, tokenizer)
        longest = max(map(len, prompts.queries)) + cfg.rollout.response_length
        data.check_positions(policy, longest, "rollout.response_length")
        summary, rows = measure(cfg, policy, tokenizer, prompts, "policy")
        data.write_jsonl(run.path / "samples.jsonl", rows)
        _write_summary(run, {"evaluate": summary})
        return {"evaluate": summary, "run": str(run.path)}


def print_summary(summary: dict[str, Any]) -> None:
    """The summary as a table, and the sample posts with the responses of both policies."""
    console = Console()
    table = Table("measure", "value", title=escape(f"summary of {summary['run']}"))
    for section, values in summary.items():
        if isinstance(values, dict):
            for name, value in values.items():
                if "/" in name or name == "tokens_per_second":
                    continue  # of the last training step; they stand in summary.json
                table.add_row(f"{section}.{name}", f"{value:.4g}" if isinstance(value, float) else escape(str(value)))
    console.print(table)
    for sample_row in summary.get("samples", []):
        console.rule()
        for name, value in sample_row.items():
            console.print(f"[bold]{name}:[/] ", end="")
            console.print(
                f"{value:.3f}" if isinstance(value, float) else str(value).strip(), markup=False, highlight=False
            )
