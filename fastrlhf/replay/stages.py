"""Replay of SFT and reward-model training: losses, learning rates, weights after, and the reward bias."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import get_scheduler

from fastrlhf.replay.recorded import Errors, Recording, build_optimizer, some, unpad_left
from fastrlhf.reward import pair_rewards, rewards
from fastrlhf.sft import sft_loss

__all__ = ["replay_reward", "replay_sft"]


class _Stepper:
    """The reference's cadence: an optimiser step per window of micro-batches, and a schedule that moves one
    micro-batch after it."""

    def __init__(self, modules: nn.Module, args: Mapping[str, Any], micro_rows: list[int]) -> None:
        self.window = args["gradient_accumulation_steps"]
        self.last = len(micro_rows) - 1
        self.optimizer = build_optimizer(modules, args)
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
        out.append(unpad_left(row[:last], pad_id, f"row {i}"))
    return out


def replay_sft(rec: Recording) -> Errors:
    errors, pad_id, args = Errors(), rec.meta["pad_token_id"], rec.meta["args"]
    micro = some(rec, "micro")
    prefix = "policy." if rec.weights("init.policy") else ""
    policy = rec.policy(f"init.{prefix}".rstrip("."))
    batches = [_rows(rec.ids(f"micro{i}.tokens"), pad_id) for i in range(len(micro))]
    stepper = _Stepper(policy, args, [len(b) for b in batches])
    for i, (rows, recorded) in enumerate(zip(batches, micro, strict=True)):
        errors.add("lr", stepper.lr, recorded["lr"])
        # The recorded width: rounding depends on the shapes, and Adam enlarges it where gradients are near 0.
        total, targets = sft_loss(policy, rows, [1] * len(rows), width=rec.ids(f"micro{i}.tokens").shape[1])
        loss = total / targets
        errors.add("loss", loss.detach(), recorded["loss"])
        (loss / stepper.window).backward()
        stepper.after_backward(i)
    errors.weights("final weights", policy, rec.weights(f"final.{prefix}".rstrip(".")))
    return errors


def replay_reward(rec: Recording) -> Errors:
    errors, pad_id, args = Errors(), rec.meta["pad_token_id"], rec.meta["args"]
    micro = some(rec, "micro")
    prefix = "reward." if rec.weights("init.reward") else ""
    model = rec.scalar(f"init.{prefix}".rstrip("."))
    pairs = [
        (_rows(rec.ids(f"micro{i}.chosen"), pad_id), _rows(rec.ids(f"micro{i}.rejected"), pad_id))
        for i in range(len(micro))
    ]
    stepper = _Stepper(model, args, [len(chosen) for chosen, _ in pairs])
    for i, ((chosen, rejected), recorded) in enumerate(zip(pairs, micro, strict=True)):
        errors.add("lr", stepper.lr, recorded["lr"])
        r_c, r_r = pair_rewards(model, chosen, rejected, rec.ids(f"micro{i}.chosen").shape[1])
        errors.add("chosen_rewards", r_c.detach(), recorded["chosen_rewards"])
        errors.add("rejected_rewards", r_r.detach(), recorded["rejected_rewards"])
        loss = -F.logsigmoid(r_c - r_r).mean()
        errors.add("loss", loss.detach(), recorded["loss"])
        (loss / stepper.window).backward()
        stepper.after_backward(i)
    errors.weights("final weights", model, rec.weights(f"final.{prefix}".rstrip(".")))
    if "normalisation" in rec.meta or rec.weights("normalisation"):
        normalisation = rec.meta["normalisation"]
        with torch.no_grad():
            tokens = rec.ids("normalisation.query_reference_response_token")
            got = rewards(model, _rows(tokens, pad_id), tokens.shape[1])
        errors.add("normalisation rewards", got, normalisation["rewards"])
        errors.add("bias", got.double().mean(), normalisation["bias"])
    return errors
