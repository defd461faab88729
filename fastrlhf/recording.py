"""Recordings: everything one or more updates read and wrote, in the format that `fastrlhf replay` reads.

`<name>.json` holds arguments, model shape and statistics; `<name>.safetensors` the weights before and after and
every tensor between. docs/recordings.md lists the keys.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fastrlhf.episodes import Rollout
from fastrlhf.ppo import Experience, MicroBatch, PPOModels, Settings
from fastrlhf.run_folder import atomic_write_text

__all__ = ["Recorder", "optimizer_tensors", "scatter_slots"]


def scatter_slots(parts: list[tuple[Any, Tensor, Tensor]], rows: list[int], T: int) -> tuple[Tensor, Tensor]:
    """Packed results of a micro-batch -> new log-probabilities [m,T] (1.0 outside the mask) and values [m,T] (0)."""
    place = torch.full((max(rows) + 1,), -1, dtype=torch.int64)
    place[torch.tensor(rows)] = torch.arange(len(rows))
    logprobs, values = torch.ones(len(rows), T), torch.zeros(len(rows), T)
    for chunk, new_logprobs_N, new_values_N in parts:
        for out, slots, got in (
            (logprobs, chunk.policy_slots_N, new_logprobs_N),
            (values, chunk.value_slots_N, new_values_N),
        ):
            slots = slots.cpu()
            out[place[slots // T], slots % T] = got.float().cpu()
    return logprobs, values


def _state(module: nn.Module) -> dict[str, Tensor]:
    seen: set[int] = set()
    out: dict[str, Tensor] = {}
    for name, tensor in module.state_dict().items():
        if tensor.data_ptr() not in seen or tensor.numel() == 0:  # tied weights once
            seen.add(tensor.data_ptr())
            out[name] = tensor.detach().float().cpu().clone()
    return out


def optimizer_tensors(modules: Mapping[str, nn.Module], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Adam's state per parameter: `<module>.<parameter>:<exp_avg|exp_avg_sq|step>`; empty before the first step."""
    out = {}
    for role, module in modules.items():
        for name, param in module.named_parameters():
            for key, value in optimizer.state.get(param, {}).items():
                out[f"{role}.{name}:{key}"] = value.detach().float().cpu().clone()
    return out


class Recorder:
    """Collects one PPO update and writes `update_XXXXXXXX.{json,safetensors}`."""

    def __init__(
        self,
        folder: Path,
        *,
        update: int,
        updates: int,
        models: PPOModels,
        optimizer: torch.optim.Optimizer,
        settings: Settings,
        minibatch_size: int,
        micro_batch_size: int,
        pad_id: int,
        eos_id: int,
        lr: float,
        lr0: float,
    ) -> None:
        ppo = settings.ppo
        micro = micro_batch_size if ppo.loss_reduction == "microbatch" else minibatch_size
        self.path = folder / f"update_{update:08d}"
        self.models, self.pad_id, self.eos_id = models, pad_id, eos_id
        self.micro: list[dict[str, float]] = []
        self.meta = {
            "kind": "ppo",
            "statistics": "masked",
            "layout": "tight",
            "attn": models.policy.config._attn_implementation,
            "pad_token_id": pad_id,
            "eos_token_id": eos_id,
            "model": models.policy.config.to_dict(),
            "reward_bias": models.reward_model.config.bias if models.reward_model else None,
            "critic_bias": models.critic.config.bias,
            "args": {
                "lr": lr0,
                "eps": ppo.eps,
                "weight_decay": ppo.weight_decay,
                "optimizer": "adamw",
                "gradient_accumulation_steps": minibatch_size // micro,
                "local_micro_batch_size": micro,
                "local_mini_batch_size": minibatch_size,
                "num_updates": updates,
                "tokens_per_micro_batch": settings.tokens_per_micro_batch,
                "tokens_per_forward": settings.tokens_per_forward,
                "first_update": update,
                "temperature": settings.temperature - 1e-7,
                "penalty_reward_value": ppo.missing_eos_score,
                "non_eos_penalty": ppo.missing_eos_score is not None,
                "truncate_token_id": eos_id,
                "max_grad_norm": ppo.max_grad_norm,
                "loss_reduction": ppo.loss_reduction,
                "old_logprobs": ppo.old_logprobs,
                "whiten_scope": ppo.whiten_scope,
                "ppo": {
                    "noptepochs": ppo.epochs,
                    "vf_coef": ppo.vf_coef,
                    "cliprange": ppo.clip,
                    "cliprange_value": ppo.value_clip,
                    "gamma": ppo.gamma,
                    "lam": ppo.lam,
                    "whiten_rewards": ppo.whiten_rewards,
                    "kl_coef": ppo.kl_coef,
                },
            },
            "updates": [{"lr": lr, "micro": self.micro}],
        }
        self.tensors: dict[str, Tensor] = {}
        self._weights("init")
        for key, value in _state(models.ref_policy).items():
            self.tensors[f"init.ref_policy.{key}"] = value
        if models.reward_model is not None:
            for key, value in _state(models.reward_model).items():
                self.tensors[f"init.reward.{key}"] = value
        trained = {"policy": models.policy, "critic": models.critic}
        for key, value in optimizer_tensors(trained, optimizer).items():
            self.tensors[f"init.optimizer.{key}"] = value

    def _weights(self, when: str) -> None:
        for role, module in (("policy", self.models.policy), ("critic", self.models.critic)):
            for key, value in _state(module).items():
                self.tensors[f"{when}.{role}.{key}"] = value

    def rollout(self, exp: Experience, orders: list[list[int]]) -> None:
        """The episodes, the experience made of them, and the permutations of the update."""
        roll = exp.rollout
        queries, responses = padded(roll, self.pad_id, self.eos_id)
        put = {
            "queries": queries,
            "responses": responses,
            "sequence_lengths": roll.last_index_B(),
            "has_eos": roll.has_eos_B,
            "scores": exp.scores_B,
            "logprobs": torch.where(exp.mask_BT, exp.logprobs_BT, 1.0),
            "ref_logprobs": torch.where(exp.mask_BT, exp.ref_logprobs_BT, 1.0),
            "values": exp.values_BT,
            "kl": exp.kl_BT,
            "rewards": exp.rewards_BT,
            "advantages": exp.advantages_BT,
            "returns": exp.returns_BT,
            "padding_mask": ~exp.mask_BT,
            "padding_mask_p1": ~exp.value_mask_BT,
        }
        self.tensors |= {f"update0.{k}": v.cpu().clone().contiguous() for k, v in put.items()}
        self.tensors |= {f"update0.perm{e}": torch.tensor(order) for e, order in enumerate(orders)}
        self.T = roll.response_length

    def micro_batch(self, micro: MicroBatch) -> None:
        """An observer for `optimize`."""
        j = len(self.micro)
        stats = {k: float(v) for k, v in micro.stats.items()}
        self.micro.append({"ratio_mean": stats.pop("ratio"), **stats})
        logprobs, values = scatter_slots(micro.parts, micro.rows, self.T)
        self.tensors[f"update0.micro{j}.inds"] = torch.tensor(micro.rows)
        self.tensors[f"update0.micro{j}.new_logprobs"] = logprobs
        self.tensors[f"update0.micro{j}.vpred"] = values

    def write(self) -> Path:
        """Write both files; the JSON, which makes the recording complete, last."""
        self._weights("final")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        save_file(self.tensors, self.path.with_suffix(".safetensors"))
        atomic_write_text(self.path.with_suffix(".json"), json.dumps(self.meta, indent=1, default=str))
        return self.path


def padded(rollout: Rollout, pad_id: int, eos_id: int) -> tuple[Tensor, Tensor]:
    """Queries [B,Tq] left-padded and kept responses [B,T] right-padded with `pad_id`."""
    Tq = max(len(q) for q in rollout.queries)
    queries = torch.full((rollout.rows, Tq), pad_id)
    responses = torch.full((rollout.rows, rollout.response_length), pad_id)
    for b, (q, r) in enumerate(zip(rollout.queries, rollout.responses, strict=True)):
        queries[b, Tq - len(q) :] = torch.as_tensor(q)
        responses[b, : len(r)] = torch.as_tensor(r)
    return queries, responses
