"""`fastrlhf replay`: run a recording again and compare every number with what it holds.

Recordings of PPO updates, SFT and reward-model training; the format is docs/recordings.md's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, get_scheduler

from fastrlhf.config import PPOConfig
from fastrlhf.episodes import RecordedLayout, Rollout
from fastrlhf.errors import UserError, brief
from fastrlhf.models import ScalarModel, ScalarModelConfig, disable_dropout, frozen_copy
from fastrlhf.ppo import Experience, MicroBatch, PPOModels, Settings, make_experience, optimize, score
from fastrlhf.recording import scatter_slots
from fastrlhf.reward import pair_rewards, rewards
from fastrlhf.sft import sft_loss

__all__ = ["Recording", "replay"]


class Recording:
    """A recording on disk. Raises `UserError` when it is missing, torn or of an unknown kind."""

    def __init__(self, basename: str) -> None:
        base = basename.removesuffix(".json").removesuffix(".safetensors")
        meta_path, tensor_path = Path(f"{base}.json"), Path(f"{base}.safetensors")
        for path in (meta_path, tensor_path):
            if not path.is_file():
                raise UserError(f"replay: {path} does not exist; give a recording's path without its ending")
        try:
            self.meta: dict[str, Any] = json.loads(meta_path.read_text(encoding="utf-8"))
            with safe_open(tensor_path, "pt") as file:
                self.tensors: dict[str, Tensor] = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except (json.JSONDecodeError, UnicodeDecodeError, SafetensorError) as err:
            raise UserError(f"replay: {base} is not a readable recording: {err}") from err
        if not isinstance(self.meta, dict) or self.meta.get("kind") not in ("ppo", "sft", "reward"):
            kind = self.meta.get("kind") if isinstance(self.meta, dict) else None
            raise UserError(f"replay: {meta_path} has kind {kind!r}; ppo, sft and reward can be replayed")
        missing = [key for key in ("args", "model") if key not in self.meta]
        if missing:
            raise UserError(f"replay: {meta_path} lacks {missing[0]!r}; it is not a whole recording")
        self.base = base

    def __getitem__(self, key: str) -> Tensor:
        try:
            return self.tensors[key]
        except KeyError:
            raise UserError(f"replay: {self.base}.safetensors lacks {key!r}; it is not a whole recording") from None

    def weights(self, prefix: str) -> dict[str, Tensor]:
        """The tensors under `prefix.`, by the rest of their names."""
        cut = len(prefix) + 1
        return {k[cut:]: v for k, v in self.tensors.items() if k.startswith(prefix + ".")}

    def _attn(self) -> dict[str, str]:
        return {"attn_implementation": self.meta["attn"]} if "attn" in self.meta else {}

    def policy(self, prefix: str) -> PreTrainedModel:
        shape = dict(self.meta["model"])
        config = AutoConfig.for_model(shape.pop("model_type", "gpt_neox"), **shape)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **self._attn())
        load(model, self.weights(prefix), f"{self.base}: {prefix}")
        disable_dropout(model)
        return model

    def scalar(self, prefix: str, bias: float = 0.0) -> ScalarModel:
        shape = {"model_type": "gpt_neox", **self.meta["model"]}
        config = AutoConfig.for_model(**shape).get_text_config()  # not every family calls its width hidden_size
        hidden = getattr(config, "word_embed_proj_dim", None) or config.hidden_size
        model = ScalarModel(ScalarModelConfig(base_config=shape, hidden_size=hidden, bias=bias, **self._attn()))
        load(model, self.weights(prefix), f"{self.base}: {prefix}")
        disable_dropout(model)
        return model


# GPT-NeoX's output projection: `embed_out` in transformers 4, `lm_head` in 5.
HEAD_NAMES = ("lm_head.weight", "embed_out.weight")


def _renamed(weights: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    have = model.state_dict().keys()
    head = next((name for name in HEAD_NAMES if name in have), None)
    return {(head if head and key in HEAD_NAMES else key): value for key, value in weights.items()}


def load(model: nn.Module, weights: Mapping[str, Tensor], where: str) -> None:
    """Copy recorded weights into `model`, strictly."""
    missing, unexpected = model.load_state_dict(_renamed(weights, model), strict=False)
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - {
        n for n, _ in model.named_parameters()
    }
    missing = [
        key for key in missing if key not in tied and "rotary_emb" not in key and not key.endswith(".attention.bias")
    ]
    if missing or unexpected:
        raise UserError(f"replay: {where} does not fit the model: missing {missing[:3]}, unexpected {unexpected[:3]}")


class Errors:
    """The largest absolute difference of each quantity."""

    def __init__(self) -> None:
        self.worst: dict[str, float] = {}

    def add(self, name: str, ours: Any, theirs: Any) -> None:
        a, b = torch.as_tensor(ours).double(), torch.as_tensor(theirs).double()
        if a.shape != b.shape:
            raise UserError(f"replay: {name} has shape {tuple(b.shape)} in the recording, {tuple(a.shape)} here")
        # Equal infinities and NaN against NaN are agreement; NaN on one side only must show as a difference.
        same = (a == b) | (a.isnan() & b.isnan())
        diff = torch.where(same, 0.0, (a - b).abs().nan_to_num(float("inf")))
        worst = float(diff.max()) if diff.numel() else 0.0
        self.worst[name] = max(self.worst.get(name, 0.0), worst)

    def weights(self, prefix: str, model: nn.Module, recorded: Mapping[str, Tensor]) -> None:
        ours = model.state_dict()
        if not recorded:
            raise UserError(f"replay: the recording holds no {prefix} weights")
        renamed = _renamed(recorded, model)
        absent = {name for name, _ in model.named_parameters()} - renamed.keys()
        if absent:
            raise UserError(f"replay: the recording lacks {min(absent)} of the {prefix} weights; it is not a whole one")
        for key, value in renamed.items():
            self.add(prefix, ours[key], value)


def replay(basename: str) -> dict[str, float]:
    """The largest absolute difference for each quantity of the recording at `basename`."""
    recording = Recording(basename)
    run = {"ppo": _replay_ppo, "sft": _replay_sft, "reward": _replay_reward}[recording.meta["kind"]]
    try:
        return run(recording).worst
    except UserError:
        raise
    except Exception as err:
        # Nothing but the recording decides what happens here, and it may hold anything.
        what = f"{type(err).__name__}: {brief(err)}"
        raise UserError(f"replay: {recording.base} is not a whole recording that fits its model ({what})") from err


def _some(rec: Recording, key: str) -> list[dict[str, Any]]:
    """The recorded micro-batches or updates; a recording without any would pass with nothing compared."""
    if not rec.meta[key]:
        raise UserError(f"replay: {rec.base} holds no {key}; it is not a whole recording")
    return list(rec.meta[key])


def _optimizer(modules: nn.Module, args: Mapping[str, Any]) -> torch.optim.Optimizer:
    params = list(modules.parameters())
    name = args.get("optimizer", "adamw")
    if name == "adamw":
        return torch.optim.AdamW(
            params, lr=args["lr"], eps=args["eps"], weight_decay=args.get("weight_decay", 0.01), fused=True
        )
    if name == "adam":
        return torch.optim.Adam(params, lr=args["lr"], eps=args["eps"], fused=True)
    raise UserError(f"replay: optimizer {name!r} is unknown; adam and adamw can be replayed")


# --- PPO


def _settings(args: Mapping[str, Any]) -> Settings:
    p = args["ppo"]
    penalty = args.get("penalty_reward_value", -1) if args.get("non_eos_penalty", True) else None
    ppo = PPOConfig(
        eps=args["eps"],
        kl_coef=p["kl_coef"],
        gamma=p["gamma"],
        lam=p["lam"],
        clip=p["cliprange"],
        value_clip=p["cliprange_value"],
        vf_coef=p["vf_coef"],
        epochs=p["noptepochs"],
        whiten_rewards=p["whiten_rewards"],
        missing_eos_score=penalty,
        max_grad_norm=args.get("max_grad_norm"),
        loss_reduction=args.get("loss_reduction", "microbatch"),
        old_logprobs=args.get("old_logprobs", "recompute"),
        whiten_scope=args.get("whiten_scope", "rank"),
    )
    return Settings(
        ppo=ppo,
        temperature=args["temperature"] + 1e-7,
        tokens_per_micro_batch=args.get("tokens_per_micro_batch", 16_384),
        tokens_per_forward=args.get("tokens_per_forward", 16_384),
    )


def _unpad_left(row: np.ndarray, pad_id: int, what: str) -> np.ndarray:
    kept = row[int(np.argmax(row != pad_id)) :] if (row != pad_id).any() else row[:0]
    if len(kept) == 0:
        raise UserError(f"replay: {what} is all padding; there is no position to predict from")
    if (kept == pad_id).any():
        raise UserError(f"replay: {what} has padding between its tokens; only padding on the left can be replayed")
    return kept


def rollout_from_tensors(
    queries: Tensor, responses: Tensor, *, pad_id: int, eos_id: int, truncate_id: int
) -> tuple[Rollout, Tensor]:
    """Left-padded [B,Tq] queries and raw [B,T] responses -> the rollout, and the responses with PAD after truncation.

    A kept response ends at the first truncation token, or before the first PAD that was sampled; whether an EOS
    stands anywhere before the truncation is a fact of its own (REFERENCE 2.2).
    """
    post = responses.clone()
    after = (responses == truncate_id).cumsum(1) - (responses == truncate_id).long() > 0
    post[after] = pad_id
    is_pad = post == pad_id
    kept = torch.where(is_pad.any(1), is_pad.long().argmax(1), post.shape[1]).tolist()
    rollout = Rollout(
        queries=[_unpad_left(row, pad_id, f"the query of row {b}") for b, row in enumerate(queries.numpy())],
        responses=[row[:n] for row, n in zip(post.numpy(), kept, strict=True)],
        has_eos_B=(post == eos_id).any(1),
        response_length=post.shape[1],
        recorded=RecordedLayout((queries == pad_id).sum(1).tolist(), queries.shape[1] + post.shape[1]),
    )
    return rollout, post


def _replay_ppo(rec: Recording) -> Errors:
    args, errors = rec.meta["args"], Errors()
    settings = _settings(args)
    policy = rec.policy("init.policy")
    ref = rec.policy("init.ref_policy") if rec.weights("init.ref_policy") else policy
    has_reward = bool(rec.weights("init.reward"))
    models = PPOModels(
        policy=policy,
        ref_policy=frozen_copy(ref),
        critic=rec.scalar("init.critic", rec.meta.get("critic_bias") or 0.0),
        reward_model=rec.scalar("init.reward", rec.meta.get("reward_bias") or 0.0) if has_reward else None,
    )
    optimizer = _optimizer(models.trained(), args)
    _load_optimizer(rec, models, optimizer)
    for u, update in enumerate(_some(rec, "updates")):
        # The first update runs at the full rate, the last one at lr/U.
        lr = args["lr"] * (1 - (args.get("first_update", 0) + u) / args["num_updates"])
        errors.add("lr", lr, update["lr"])
        for group in optimizer.param_groups:
            group["lr"] = lr
        _replay_update(rec, u, update, models, optimizer, settings, errors)
    errors.weights("final policy", policy, rec.weights("final.policy"))
    errors.weights("final critic", models.critic, rec.weights("final.critic"))
    return errors


def _load_optimizer(rec: Recording, models: PPOModels, optimizer: torch.optim.Optimizer) -> None:
    saved = rec.weights("init.optimizer")
    if not saved:
        return
    for role, module in (("policy", models.policy), ("critic", models.critic)):
        for name, param in module.named_parameters():
            for key in ("exp_avg", "exp_avg_sq", "step"):
                value = saved[f"{role}.{name}:{key}"].clone()
                if value.shape != (() if key == "step" else param.shape):  # the fused optimiser would read past its end
                    raise UserError(f"replay: {rec.base}: Adam's {key} of {role}.{name} has shape {tuple(value.shape)}")
                optimizer.state[param][key] = value


def _replay_update(
    rec: Recording,
    u: int,
    update: Mapping[str, Any],
    models: PPOModels,
    optimizer: torch.optim.Optimizer,
    settings: Settings,
    errors: Errors,
) -> None:
    args, pad_id, key = rec.meta["args"], rec.meta["pad_token_id"], f"update{u}"
    rollout, post = rollout_from_tensors(
        rec[f"{key}.queries"],
        rec[f"{key}.responses"],
        pad_id=pad_id,
        eos_id=rec.meta["eos_token_id"],
        truncate_id=args["truncate_token_id"],
    )
    if rec.meta.get("layout") == "tight":
        rollout = replace(rollout, recorded=None)
    if settings.ppo.old_logprobs == "sampler":
        given = rec[f"{key}.logprobs"].masked_fill(~rollout.masks_BT()[0], 0.0)
        rollout = replace(rollout, sampler_logprobs_BT=given)
    given_scores = None if models.reward_model is not None else rec[f"{key}.scores"]
    exp = make_experience(rollout, score(rollout, models, settings, given_scores), settings)
    recorded = {name.removeprefix(f"{key}."): t for name, t in rec.tensors.items() if name.startswith(f"{key}.")}
    _compare_experience(exp, post, recorded, errors)
    epochs = settings.ppo.epochs
    orders = [
        recorded[f"perm{e}"].tolist() if f"perm{e}" in recorded else rec[f"{key}.perm{e}"].tolist()
        for e in range(epochs)
    ]
    observer = _Observer(rec, key, update["micro"], exp, models.policy, settings, errors)
    optimize(
        exp,
        models,
        optimizer,
        orders,
        minibatch_size=args["local_mini_batch_size"],
        micro_batch_size=args["local_micro_batch_size"],
        settings=settings,
        observer=observer,
    )
    errors.add("micro-batches", observer.count, len(update["micro"]))


_NEEDED = {"scores", "logprobs", "ref_logprobs", "values", "rewards", "advantages", "returns"}


def _compare_experience(exp: Experience, post: Tensor, recorded: Mapping[str, Tensor], errors: Errors) -> None:
    missing = _NEEDED - recorded.keys()
    if missing:
        raise UserError(f"replay: the recording lacks {min(missing)!r} of an update; it is not a whole recording")
    ours = {
        "sequence_lengths": exp.rollout.last_index_B(),
        "postprocessed_responses": post,
        "padding_mask": ~exp.mask_BT,
        "padding_mask_p1": ~exp.value_mask_BT,
        "scores": exp.scores_B,
        # The reference fills masked slots with 1.0.
        "logprobs": torch.where(exp.mask_BT, exp.logprobs_BT, 1.0),
        "ref_logprobs": torch.where(exp.mask_BT, exp.ref_logprobs_BT, 1.0),
        "values": exp.values_BT,
        "kl": exp.kl_BT,
        "rewards": exp.rewards_BT,
        "advantages": exp.advantages_BT,
        "returns": exp.returns_BT,
    }
    for name, value in ours.items():
        if name in recorded:
            errors.add(name, value, recorded[name])


class _Observer:
    """Compares each micro-batch with the recording, before the optimiser moves."""

    def __init__(
        self,
        rec: Recording,
        key: str,
        micro: list[dict[str, float]],
        exp: Experience,
        policy: PreTrainedModel,
        settings: Settings,
        errors: Errors,
    ) -> None:
        self.rec, self.key, self.micro, self.exp = rec, key, micro, exp
        self.policy, self.settings, self.errors = policy, settings, errors
        self.unmasked = rec.meta.get("statistics", "reference") == "reference"
        self.count = 0

    def __call__(self, got: MicroBatch) -> None:
        j, T = self.count, self.exp.rollout.response_length
        self.count += 1
        if j >= len(self.micro):
            return
        recorded, key = self.micro[j], f"{self.key}.micro{j}"
        new_logprobs, vpred = scatter_slots(got.parts, got.rows, T)
        for name, value in (("inds", torch.tensor(got.rows)), ("new_logprobs", new_logprobs), ("vpred", vpred)):
            if f"{key}.{name}" in self.rec.tensors:
                self.errors.add(name, value, self.rec[f"{key}.{name}"])
        stats = {"ratio_mean": got.stats["ratio"], **got.stats}
        if self.unmasked:
            stats |= self._unmasked(got)
        for name, wanted in recorded.items():
            if name in stats:
                self.errors.add(name, stats[name], wanted)

    def _unmasked(self, got: MicroBatch) -> dict[str, Tensor]:
        """The reference's means over all slots: masked ones count as ratio 1 and difference 0."""
        mask = self.exp.mask_BT[got.rows]
        share = mask.float().mean()
        return {
            "ratio_mean": got.stats["ratio"] * share + (1 - share),
            "approxkl": got.stats["approxkl"] * share,
            "entropy": self._entropy(got.rows),
        }

    @torch.no_grad()
    def _entropy(self, rows: list[int]) -> Tensor:
        """Mean entropy over all slots, those after EOS too: needs the raw responses and the reference's masked pass."""
        queries, responses = self.rec[f"{self.key}.queries"][rows], self.rec[f"{self.key}.responses"][rows]
        ids = torch.cat([queries, responses], 1)
        attention_mask = ids != self.rec.meta["pad_token_id"]
        out = self.policy(input_ids=ids.masked_fill(~attention_mask, 0), attention_mask=attention_mask)
        logits = out.logits[:, queries.shape[1] - 1 : -1].float() / self.settings.temperature
        probs = F.softmax(logits, -1)
        return (torch.logsumexp(logits, -1) - (probs * logits).sum(-1)).mean()


# --- SFT and reward model


class _Stepper:
    """The reference's cadence: an optimiser step per window of micro-batches, and a schedule that moves one
    micro-batch after it."""

    def __init__(self, modules: nn.Module, args: Mapping[str, Any], micro_rows: list[int]) -> None:
        self.window = args["gradient_accumulation_steps"]
        self.last = len(micro_rows) - 1
        self.optimizer = _optimizer(modules, args)
        self.scheduler = get_scheduler(
            args.get("scheduler", "cosine"),
            self.optimizer,
            num_warmup_steps=args.get("warm_up_steps", 0),
            num_training_steps=sum(micro_rows) // (args["local_micro_batch_size"] * self.window),
        )

    @property
    def lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def after_backward(self, i: int) -> None:
        if (i + 1) % self.window == 0 or i == self.last:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        if i > 0 and i % self.window == 0:
            self.scheduler.step()


def _rows(tokens: Tensor, pad_id: int) -> list[np.ndarray]:
    """Rows without the padding at their ends."""
    out = []
    for i, row in enumerate(tokens.numpy()):
        last = int(np.max(np.nonzero(row != pad_id)[0], initial=-1)) + 1
        out.append(_unpad_left(row[:last], pad_id, f"row {i}"))
    return out


def _replay_sft(rec: Recording) -> Errors:
    errors, pad_id, args = Errors(), rec.meta["pad_token_id"], rec.meta["args"]
    micro = _some(rec, "micro")
    prefix = "policy." if rec.weights("init.policy") else ""
    policy = rec.policy(f"init.{prefix}".rstrip("."))
    batches = [_rows(rec[f"micro{i}.tokens"], pad_id) for i in range(len(micro))]
    stepper = _Stepper(policy, args, [len(b) for b in batches])
    for i, (rows, recorded) in enumerate(zip(batches, micro, strict=True)):
        errors.add("lr", stepper.lr, recorded["lr"])
        # The recorded width: rounding depends on the shapes, and Adam enlarges it where gradients are near 0.
        total, targets = sft_loss(policy, rows, [1] * len(rows), width=rec[f"micro{i}.tokens"].shape[1])
        loss = total / targets
        errors.add("loss", loss.detach(), recorded["loss"])
        (loss / stepper.window).backward()
        stepper.after_backward(i)
    errors.weights("final weights", policy, rec.weights(f"final.{prefix}".rstrip(".")))
    return errors


def _replay_reward(rec: Recording) -> Errors:
    errors, pad_id, args = Errors(), rec.meta["pad_token_id"], rec.meta["args"]
    micro = _some(rec, "micro")
    prefix = "reward." if rec.weights("init.reward") else ""
    model = rec.scalar(f"init.{prefix}".rstrip("."))
    pairs = [
        (_rows(rec[f"micro{i}.chosen"], pad_id), _rows(rec[f"micro{i}.rejected"], pad_id)) for i in range(len(micro))
    ]
    stepper = _Stepper(model, args, [len(chosen) for chosen, _ in pairs])
    for i, ((chosen, rejected), recorded) in enumerate(zip(pairs, micro, strict=True)):
        errors.add("lr", stepper.lr, recorded["lr"])
        r_c, r_r = pair_rewards(model, chosen, rejected, rec[f"micro{i}.chosen"].shape[1])
        errors.add("chosen_rewards", r_c.detach(), recorded["chosen_rewards"])
        errors.add("rejected_rewards", r_r.detach(), recorded["rejected_rewards"])
        loss = -F.logsigmoid(r_c - r_r).mean()
        errors.add("loss", loss.detach(), recorded["loss"])
        (loss / stepper.window).backward()
        stepper.after_backward(i)
    errors.weights("final weights", model, rec.weights(f"final.{prefix}".rstrip(".")))
    if "normalisation" in rec.meta:
        normalisation = rec.meta["normalisation"]
        with torch.no_grad():
            tokens = rec["normalisation.query_reference_response_token"]
            got = rewards(model, _rows(tokens, pad_id), tokens.shape[1])
        errors.add("normalisation rewards", got, normalisation["rewards"])
        errors.add("bias", got.double().mean(), normalisation["bias"])
    return errors
