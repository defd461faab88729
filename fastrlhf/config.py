"""The configuration: small nested dataclasses, filled from YAML and dotted overrides.

Nothing here imports torch, so `--help` and a bad key answer at once. Derived numbers live in
`BatchSizes`, never in the configuration itself.
"""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin, get_type_hints

from fastrlhf.errors import UserError, did_you_mean

__all__ = ["BatchSizes", "Config", "check_values", "exact_div", "type_words"]


@dataclass
class ModelConfig:
    """The model that a stage starts from."""

    path: str | None = None
    """Folder or hub id to start from: the base model for sft, the SFT model for reward and ppo."""
    from_scratch: dict[str, Any] | None = None
    """Random weights instead of `path`: a transformers configuration, e.g. {model_type: gpt_neox, hidden_size: 128}."""
    tokenizer: str | None = None
    """Folder or hub id of the tokenizer; default: the one in `path`."""
    train_tokenizer: int | None = None
    """Train a byte-level BPE of this many ids on the SFT data instead of loading a tokenizer."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Storage and compute type of the weights; under bfloat16 the optimiser keeps fp32 copies and steps on those."""
    device: str = "auto"
    """Where to run: auto (a CUDA device if there is one, else the CPU), cpu, cuda, cuda:1."""
    trust_remote_code: bool = False
    """Allow Python code that comes with a model folder or hub id to run."""


@dataclass
class DataConfig:
    """Where the rows come from: a hub id, or a .jsonl, .parquet or .csv file."""

    sft: str | None = None
    """Rows with prompt and completion (or subreddit, title, post and summary)."""
    preferences: str | None = None
    """Rows with prompt, chosen and rejected (or subreddit, title, post, chosen and rejected)."""
    prompts: str | None = None
    """Rows with prompt, for PPO; default: the prompts of `sft`."""
    sft_eval: str | None = None
    """Held-out rows for SFT; default: `eval_split` of a hub id, or `eval_fraction` of `sft`."""
    preferences_eval: str | None = None
    """Held-out pairs; default: `eval_split` of a hub id, or `eval_fraction` of `preferences`."""
    prompts_eval: str | None = None
    """Held-out prompts; default: `eval_split` of a hub id, or `eval_fraction` of `prompts`."""
    train_split: str = "train"
    """Split of a hub data set to train on."""
    eval_split: str | None = "validation"
    """Split of a hub data set to evaluate on; null holds out `eval_fraction` of the training split."""
    eval_fraction: float = 0.05
    """Share held out of a file without its own evaluation rows; chosen by a hash of the prompt, so that every
    stage holds out the same prompts."""
    max_query_length: int = 512
    """Longest query in tokens. Longer: the post is cut at a newline (TL;DR columns), a raw prompt from the left."""
    max_response_length: int = 53
    """Longest SFT completion in tokens, EOS included; a longer one is cut and loses its EOS."""
    max_preference_length: int = 169
    """Longest chosen or rejected response in tokens, EOS included."""


@dataclass
class SFTConfig:
    """Supervised fine-tuning (REFERENCE item 9)."""

    lr: float = 3e-6
    """Peak learning rate; cosine to 0."""
    eps: float = 1e-5
    """Adam's epsilon."""
    weight_decay: float = 0.01
    """AdamW's decoupled weight decay."""
    warmup_steps: int = 0
    """Steps of linear warm-up."""
    epochs: int = 1
    """Passes over the data."""
    batch_size: int = 128
    """Rows per optimiser step."""
    loss_on: Literal["all", "response"] = "all"
    """Tokens the loss is taken over: query and response, or the response only."""
    eval_rows: int = 256
    """Held-out rows for the loss after training (0: none)."""


@dataclass
class RewardConfig:
    """Training of the reward model (REFERENCE items 10 to 15)."""

    lr: float = 3e-6
    """Peak learning rate; cosine to 0."""
    eps: float = 1e-5
    """Adam's epsilon."""
    weight_decay: float = 0.01
    """AdamW's decoupled weight decay."""
    warmup_steps: int = 0
    """Steps of linear warm-up."""
    epochs: int = 1
    """Passes over the pairs."""
    batch_size: int = 64
    """Pairs per optimiser step."""
    normalize: bool = True
    """Store the mean reward of the SFT references as the bias, so that references average 0."""
    eval_rows: int = 2000
    """Held-out pairs for the accuracy (0: none)."""


@dataclass
class RolloutConfig:
    """Sampling of responses."""

    engine: Literal["native", "hf"] = "native"
    """native: our decode loop. hf: transformers' generate, the oracle."""
    temperature: float = 0.7
    """Sampling temperature; log-probabilities are of the tempered distribution (1e-7 is added, as in the paper)."""
    response_length: int = 53
    """Most tokens sampled per response."""
    rows_per_batch: int = 64
    """Rows decoded together, sorted by length."""


@dataclass
class PPOConfig:
    """Proximal policy optimisation (REFERENCE section 2)."""

    lr: float = 3e-6
    """Learning rate of the first update; linear to lr/updates."""
    eps: float = 1e-5
    """Adam's epsilon."""
    weight_decay: float = 0.01
    """AdamW's decoupled weight decay."""
    kl_coef: float = 0.05
    """Weight of the per-token KL penalty (k1 estimator)."""
    gamma: float = 1.0
    """Discount."""
    lam: float = 0.95
    """GAE's lambda."""
    clip: float = 0.2
    """Clip range of the policy ratio."""
    value_clip: float = 0.2
    """Clip range of the value around the rollout's value."""
    vf_coef: float = 0.1
    """Weight of the value loss."""
    epochs: int = 4
    """Passes over each rollout."""
    whiten_rewards: bool = False
    """Scale per-token rewards to unit deviation, mean kept (harmful in the paper)."""
    missing_eos_score: float | None = -1.0
    """Score that replaces the reward of a response without EOS; null keeps the reward."""
    max_grad_norm: float | None = None
    """Clip the gradient to this norm; null: no clipping, as in the paper."""
    preset: Literal["default", "reference"] = "default"
    """reference, as the paper's code: loss_reduction microbatch, old_logprobs sampler, whiten_scope rank, whatever
    these fields say."""
    loss_reduction: Literal["minibatch", "microbatch"] = "minibatch"
    """Token mean over the minibatch, or the reference's mean of micro-batch means (`batch.micro_batch_size`)."""
    old_logprobs: Literal["recompute", "sampler"] = "recompute"
    """Old log-probabilities from a forward pass (first ratio exactly 1), or as recorded while sampling."""
    whiten_scope: Literal["rank", "global"] = "global"
    """Whiten over each rank's episodes, or over those of all ranks."""
    reward_model: str | None = None
    """Folder or hub id of the reward model; the critic starts from it too."""
    reward_function: str | None = None
    """module:name of a Python function (prompts, responses) -> one float each, instead of a reward model."""
    record_rollouts: bool = False
    """Write each rollout and its update into `ppo/recordings/`, to be replayed by `fastrlhf replay`."""


@dataclass
class BatchConfig:
    """Sizes of PPO's batches."""

    episodes: int = 999_936
    """Episodes in all: a multiple of prompts_per_update."""
    prompts_per_update: int = 512
    """Episodes per rollout."""
    minibatches: int = 1
    """Optimiser steps per epoch over a rollout."""
    micro_batch_size: int | None = None
    """Rows per loss mean with ppo.loss_reduction: microbatch; it must divide a minibatch."""
    tokens_per_micro_batch: int = 0
    """Most tokens (padding included) in one forward and backward pass: memory and speed only, the result does not
    change. 0: 2048 on a CPU, whose caches hold no more, else 16384."""
    tokens_per_forward: int = 0
    """Most tokens in one pass without gradient. 0: 4096 on a CPU, else 32768."""


@dataclass
class EvaluateConfig:
    """Sampling on held-out prompts."""

    rows: int = 400
    """Held-out prompts to sample on (fewer if there are fewer)."""
    temperature: float = 0.01
    """Sampling temperature of the evaluation."""


@dataclass
class KernelsConfig:
    """fastrlhf_kernels."""

    backend: Literal["auto", "eager"] = "auto"
    """Which implementation of the ops runs."""


@dataclass
class DistributedConfig:
    """Several processes."""

    strategy: Literal["none"] = "none"
    """none: one process."""


@dataclass
class LogConfig:
    """What a run writes and shows."""

    progress: Literal["auto", "rich", "plain"] = "auto"
    """Live progress, or plain lines (auto: plain when the output is not a terminal)."""
    tensorboard: bool = True
    """Write TensorBoard events."""
    wandb: bool = False
    """Log to Weights & Biases (pip install 'fastrlhf[wandb]')."""
    trackio: bool = False
    """Log to trackio (pip install 'fastrlhf[trackio]')."""
    project: str = "fastrlhf"
    """Project name for W&B and trackio."""
    samples: int = 3
    """Responses written to samples.jsonl per update."""


@dataclass
class CheckpointConfig:
    """Checkpoints inside a run folder."""

    every: int = 50
    """Optimiser steps (sft, reward) or updates (ppo) between checkpoints; 0: only on a signal."""
    keep: int = 2
    """Checkpoints kept; older ones are removed."""


@dataclass
class Config:
    """Everything a run depends on; saved as config.yaml in its folder."""

    seed: int = 1
    """Seed from which every named random stream is derived."""
    output_dir: str | None = None
    """The run's folder; default: a new one, runs/<command>-<date>-<time>."""
    resume: bool = False
    """Go on with the run in `output_dir`; the command line takes its config.yaml unless --config is given."""
    attn: Literal["auto", "sdpa", "eager"] = "auto"
    """Attention implementation of transformers."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    sft: SFTConfig = field(default_factory=SFTConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    log: LogConfig = field(default_factory=LogConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)


_AT_LEAST_1 = (
    "data.max_query_length",
    "data.max_response_length",
    "data.max_preference_length",
    "sft.epochs",
    "sft.batch_size",
    "reward.epochs",
    "reward.batch_size",
    "rollout.response_length",
    "rollout.rows_per_batch",
    "ppo.epochs",
    "batch.episodes",
    "batch.prompts_per_update",
    "batch.minibatches",
    "batch.micro_batch_size",
    "evaluate.rows",
    "checkpoint.keep",
)
_ABOVE_0 = ("sft.eps", "reward.eps", "ppo.eps", "rollout.temperature", "ppo.max_grad_norm")
_PATHS = ("output_dir", "model.path", "model.tokenizer", "ppo.reward_model")
"""A leading ~ is the home folder; data sources see to it themselves."""
_AT_MOST_1 = ("ppo.gamma", "ppo.lam")
_ANY_SIGN = ("ppo.missing_eos_score", "ppo.kl_coef")


def check_values(section: Any, prefix: str = "") -> None:
    """Refuse fields that do not exist, values of another type, which Python lets anyone assign, and numbers that no run
    can use. Paths and numpy's numbers become plain ones.

    `section`: a `Config`, or one of its sections with the `prefix` of its fields. Raises `UserError` naming the field.
    """
    hints = get_type_hints(type(section))
    for name in vars(section):
        if name not in hints:
            raise UserError(f"there is no field {prefix}{name}{did_you_mean(name, hints, prefix)}")
    for name, kind in hints.items():
        value = getattr(section, name)
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        if isinstance(value, str) and f"{prefix}{name}" in _PATHS:
            value = os.path.expanduser(value)
        elif hasattr(value, "item") and getattr(value, "ndim", None) == 0:
            value = value.item()
        if kind is float and type(value) is int:
            value = float(value)
        setattr(section, name, value)
        if dataclasses.is_dataclass(kind):
            if type(value) is not kind:
                raise UserError(f"{prefix}{name} is {value!r}; it must be a section of fields")
            check_values(value, f"{prefix}{name}.")
        elif not _fits(value, kind):
            raise UserError(f"{prefix}{name} is {value!r}; it must be {type_words(kind)}")
        elif isinstance(value, str) and (not value.strip() or "\0" in value):
            raise UserError(f"{prefix}{name} is {value!r}; give it a value or leave it out")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            _check_number(f"{prefix}{name}", value)


def _check_number(name: str, value: float) -> None:
    rules = (
        (isinstance(value, float) and not math.isfinite(value), "must be a finite number"),
        (isinstance(value, float) and abs(value) > 3e38, "must fit into 32 bits, at most 3e38"),
        (name in _AT_LEAST_1 and value < 1, "must be at least 1"),
        (name in _ABOVE_0 and value <= 0, "must be above 0"),
        (name in _AT_MOST_1 and value > 1, "must be at most 1"),
        (name not in _ANY_SIGN and value < 0, "must not be negative"),
        # A byte-level BPE has 256 bytes and an EOS; the upper bound is where tokenizers runs out of memory.
        (name == "model.train_tokenizer" and not 257 <= value <= 1_000_000, "must lie between 257 and 1,000,000 ids"),
    )
    for broken, rule in rules:
        if broken:
            raise UserError(f"{name} is {value}; it {rule}")


def _fits(value: Any, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) is dict:
        return isinstance(value, dict)
    if get_args(kind):  # a union
        return any(_fits(value, part) for part in get_args(kind))
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return type(value) is kind


def type_words(kind: Any) -> str:
    """What a value of this type is, for a message."""
    if get_origin(kind) is Literal:
        return " or ".join(map(str, get_args(kind)))
    if get_origin(kind) is not dict and get_args(kind):
        return " or ".join(type_words(part) for part in get_args(kind))
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null"}
    return names.get(kind, "a mapping")


def exact_div(a: int, b: int, what: str, by: str) -> int:
    """a / b, or a `UserError` naming the two fields and the nearest values that work."""
    if b < 1:
        raise UserError(f"{by} is {b}; it must be at least 1")
    if a % b:
        low, high = a // b * b, (a // b + 1) * b
        near = f"{high}" if low == 0 else f"{low} or {high}"
        raise UserError(f"{what} = {a} is not a multiple of {by} = {b}; use {near}")
    return a // b


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """PPO's batch arithmetic, derived once from a configuration.

    Raises `UserError` where a division is not exact.
    """

    episodes: int
    rollout: int
    minibatch: int
    micro_batch: int
    updates: int
    optimizer_steps: int

    @staticmethod
    def derive(cfg: Config, world_size: int = 1) -> BatchSizes:
        b = cfg.batch
        updates = exact_div(b.episodes, b.prompts_per_update, "batch.episodes", "batch.prompts_per_update")
        if updates < 1:
            raise UserError(f"batch.episodes = {b.episodes} gives no update; use {b.prompts_per_update} or more")
        rollout = exact_div(b.prompts_per_update, world_size, "batch.prompts_per_update", "the number of processes")
        minibatch = exact_div(rollout, b.minibatches, "batch.prompts_per_update", "batch.minibatches")
        micro = minibatch
        if b.micro_batch_size is not None:
            exact_div(
                minibatch, b.micro_batch_size, "batch.prompts_per_update / batch.minibatches", "batch.micro_batch_size"
            )
            micro = b.micro_batch_size
        steps = updates * cfg.ppo.epochs * b.minibatches
        return BatchSizes(b.episodes, rollout, minibatch, micro, updates, steps)
