"""Replay of PPO updates: every tensor from scores to returns, every micro-batch, and the weights after.

B = episodes, T = response slots, Tq = query slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from fastrlhf.config import PPOConfig
from fastrlhf.episodes import RecordedLayout, Rollout
from fastrlhf.errors import UserError
from fastrlhf.models import frozen_copy
from fastrlhf.ppo import Experience, MicroBatch, PPOModels, Settings, make_experience, optimize, score
from fastrlhf.recording import scatter_slots
from fastrlhf.replay.recorded import Errors, Recording, build_optimizer, choice, some, unpad_left

__all__ = ["replay_ppo", "rollout_from_tensors"]


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
        loss_reduction=choice(args, "loss_reduction", ("microbatch", "minibatch")),  # type: ignore[arg-type]
        old_logprobs=choice(args, "old_logprobs", ("recompute", "sampler")),  # type: ignore[arg-type]
        whiten_scope=choice(args, "whiten_scope", ("rank", "global")),  # type: ignore[arg-type]
    )
    return Settings(
        ppo=ppo,
        temperature=args["temperature"] + 1e-7,
        tokens_per_micro_batch=args.get("tokens_per_micro_batch", 16_384),
        tokens_per_forward=args.get("tokens_per_forward", 16_384),
    )


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
        queries=[unpad_left(row, pad_id, f"the query of row {b}") for b, row in enumerate(queries.numpy())],
        responses=[row[:n] for row, n in zip(post.numpy(), kept, strict=True)],
        has_eos_B=(post == eos_id).any(1),
        response_length=post.shape[1],
        recorded=RecordedLayout((queries == pad_id).sum(1).tolist(), queries.shape[1] + post.shape[1]),
    )
    return rollout, post


def replay_ppo(rec: Recording) -> Errors:
    args, errors = rec.meta["args"], Errors()
    settings = _settings(args)
    policy = rec.policy("init.policy")
    ref = rec.policy("init.ref_policy") if rec.weights("init.ref_policy") else policy
    # Only a recording that says that a function gave the scores can do without a reward model: its scores are inputs.
    by_function = "reward_bias" in rec.meta and rec.meta["reward_bias"] is None
    if by_function and rec.weights("init.reward"):
        raise UserError(f"replay: {rec.base} has weights of a reward model, but no reward_bias; it is not a whole one")
    models = PPOModels(
        policy=policy,
        ref_policy=frozen_copy(ref),
        critic=rec.scalar("init.critic", rec.meta.get("critic_bias") or 0.0),
        reward_model=rec.scalar("init.reward", rec.meta.get("reward_bias") or 0.0) if not by_function else None,
    )
    optimizer = build_optimizer(models.trained(), args)
    _load_optimizer(rec, models, optimizer)
    for u, update in enumerate(some(rec, "updates")):
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
        rec.ids(f"{key}.queries"),
        rec.ids(f"{key}.responses"),
        pad_id=pad_id,
        eos_id=rec.meta["eos_token_id"],
        truncate_id=args["truncate_token_id"],
    )
    if choice(rec.meta, "layout", ("padded", "tight")) == "tight":
        rollout = replace(rollout, recorded=None)
    if settings.ppo.old_logprobs == "sampler":
        given = rec.get(f"{key}.logprobs", torch.float32).masked_fill(~rollout.masks_BT()[0], 0.0)
        rollout = replace(rollout, sampler_logprobs_BT=given)
    given_scores = None if models.reward_model is not None else rec.get(f"{key}.scores", torch.float32)
    exp = make_experience(rollout, score(rollout, models, settings, given_scores), settings)
    _compare_experience(exp, post, rec, key, errors)
    orders = [rec.ids(f"{key}.perm{e}").tolist() for e in range(settings.ppo.epochs)]
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


_OPTIONAL = {"postprocessed_responses", "query_responses", "has_eos"}
_STATISTICS = ("pg_loss", "vf_loss", "loss", "pg_clipfrac", "vf_clipfrac", "ratio_mean", "approxkl", "entropy")


def _compare_experience(exp: Experience, post: Tensor, rec: Recording, key: str, errors: Errors) -> None:
    ours = {
        "query_responses": torch.cat([rec.ids(f"{key}.queries"), rec.ids(f"{key}.responses")], 1),
        "postprocessed_responses": post,
        "has_eos": exp.rollout.has_eos_B,
        "sequence_lengths": exp.rollout.last_index_B(),
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
        if f"{key}.{name}" in rec.tensors or name not in _OPTIONAL:
            errors.add(name, value, rec.get(f"{key}.{name}", value.dtype))


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
        self.unmasked = choice(rec.meta, "statistics", ("reference", "masked")) == "reference"
        self.count = 0

    def __call__(self, got: MicroBatch) -> None:
        j, T = self.count, self.exp.rollout.response_length
        self.count += 1
        if j >= len(self.micro):
            return
        recorded, key = self.micro[j], f"{self.key}.micro{j}"
        new_logprobs, vpred = scatter_slots(got.parts, got.rows, T)
        for name, value in (("inds", torch.tensor(got.rows)), ("new_logprobs", new_logprobs), ("vpred", vpred)):
            self.errors.add(name, value, self.rec.get(f"{key}.{name}", value.dtype))
        stats = {"ratio_mean": got.stats["ratio"], **got.stats}
        if self.unmasked:
            stats |= self._unmasked(got)
        for name in _STATISTICS if self.unmasked else stats.keys() - {"ratio"}:
            if name not in recorded:
                raise UserError(f"replay: {self.rec.base}.json lacks {name!r} of {key}; it is not a whole recording")
            self.errors.add(name, stats[name], recorded[name])

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
        queries, responses = (self.rec.ids(f"{self.key}.{name}")[rows] for name in ("queries", "responses"))
        ids = torch.cat([queries, responses], 1)
        attention_mask = ids != self.rec.meta["pad_token_id"]
        out = self.policy(input_ids=ids.masked_fill(~attention_mask, 0), attention_mask=attention_mask)
        logits = out.logits[:, queries.shape[1] - 1 : -1].float() / self.settings.temperature
        probs = F.softmax(logits, -1)
        return (torch.logsumexp(logits, -1) - (probs * logits).sum(-1)).mean()
