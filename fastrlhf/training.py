"""The supervised loop that SFT and the reward model share, and the learning-rate schedules of all stages."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn

from fastrlhf.checkpoint import StopSignal, latest_checkpoint, load_checkpoint, named_generator, save_checkpoint
from fastrlhf.config import Config, RewardConfig, SFTConfig
from fastrlhf.data.batching import epoch_order
from fastrlhf.errors import UserError
from fastrlhf.metrics import Metrics
from fastrlhf.optimizer import adamw
from fastrlhf.run_folder import RunFolder

__all__ = [
    "Interrupted",
    "StepResult",
    "cosine",
    "diverged",
    "fit",
    "require_finite",
    "require_finite_weights",
]


class Interrupted(Exception):
    """SIGINT or SIGTERM arrived; a checkpoint was written and the stage left."""


def cosine(step: int, total: int, warmup: int = 0) -> float:
    """Factor on the peak learning rate at optimiser step `step` of `total`: linear warm-up, then cosine to 0."""
    if step < warmup:
        return step / max(1, warmup)
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / max(1, total - warmup))))


@dataclass(frozen=True, slots=True)
class StepResult:
    """One batch: means to log, and the tokens it held."""

    means: dict[str, Tensor]
    tokens: int


def require_finite(values: dict[str, float], names: Sequence[str], stage: str, step: int, kept: Path | None) -> None:
    """Raise `UserError` naming the step if one of `names` is not finite."""
    for name in names:
        if not math.isfinite(values[name]):
            diverged(f"{stage}: {name} is {values[name]} at step {step}", kept)


def require_finite_weights(module: nn.Module, stage: str, step: int, kept: Path | None) -> None:
    """Raise `UserError` naming the step and a weight that is not finite; asked before weights are saved."""
    named = list(module.named_parameters())
    bad = torch.stack([~p.detach().isfinite().all() for _, p in named]).tolist()
    if any(bad):
        diverged(f"{stage}: {named[bad.index(True)][0]} is not finite after step {step}", kept)


def diverged(what: str, kept: Path | None) -> NoReturn:
    """Raise the `UserError` of a run whose numbers are no longer finite."""
    where = f"the last good checkpoint is {kept}" if kept else "there is no checkpoint yet"
    raise UserError(f"{what}; {where}; lower the learning rate or check the data")


def fit(
    model: nn.Module,
    n_rows: int,
    batch_loss: Callable[[list[int]], StepResult],
    *,
    cfg: Config,
    stage: Literal["sft", "reward"],
    run: RunFolder,
    data: str,
) -> dict[str, float]:
    """Train `model`: `batch_loss(rows)` runs forward and backward of one batch. Returns the last step's means.

    `data` is the `digest` of what it trains on, so that a run is never resumed with other rows.

    The last, smaller batch of an epoch is trained on too. Raises `Interrupted` after a signal, `UserError` on a
    loss that is not finite.
    """
    settings: SFTConfig | RewardConfig = cfg.sft if stage == "sft" else cfg.reward
    prefix = "train/sft" if stage == "sft" else "train/rm"
    per_epoch = math.ceil(n_rows / settings.batch_size)
    total = per_epoch * settings.epochs
    if settings.warmup_steps >= total:
        print(
            f"{stage}: {stage}.warmup_steps is {settings.warmup_steps}, but there are only {total} steps; "
            "the learning rate will not reach its peak",
            flush=True,
        )
    optimizer = adamw(model, lr=settings.lr, eps=settings.eps, weight_decay=settings.weight_decay)
    shuffle = named_generator(cfg.seed, f"{stage}/shuffle")
    order: list[int] = []
    step = 0
    last: dict[str, float] = {}
    checkpoint = latest_checkpoint(run.checkpoints) if cfg.resume else None
    if checkpoint is not None:
        state = load_checkpoint(
            checkpoint, modules={"model": model}, optimizer=optimizer, generators={"shuffle": shuffle}
        )
        step, order, last = state["step"], state["order"], state["last"]
        if len(order) != n_rows or state["data"] != data:
            raise UserError(
                f"resume: {stage} began with {len(order)} rows, and these {n_rows} are not the same; restore the data"
            )
    model.train()

    def save() -> Path:
        require_finite_weights(model, stage, step, latest_checkpoint(run.checkpoints))
        return save_checkpoint(
            run.checkpoints,
            step,
            modules={"model": model},
            optimizer=optimizer,
            generators={"shuffle": shuffle},
            state={"step": step, "order": order, "last": last, "data": data},
            keep=cfg.checkpoint.keep,
        )

    with Metrics(run, cfg.log, stage=stage, total_steps=total, resume_step=step) as metrics, StopSignal() as stop:
        while step < total:
            within = step % per_epoch
            if within == 0:
                order = epoch_order(n_rows, shuffle)
            rows = order[within * settings.batch_size : (within + 1) * settings.batch_size]
            began = time.perf_counter()
            lr = settings.lr * cosine(step, total, settings.warmup_steps)
            for group in optimizer.param_groups:
                group["lr"] = lr
            result = batch_loss(rows)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            values: dict[str, Any] = {f"{prefix}/{k}": v for k, v in result.means.items()}
            values |= {f"{prefix}/lr": lr, "tokens_per_second": result.tokens / (time.perf_counter() - began)}
            last = metrics.log(step, values)
            require_finite(last, [f"{prefix}/loss"], stage, step, latest_checkpoint(run.checkpoints))
            due = cfg.checkpoint.every and step % cfg.checkpoint.every == 0 and step < total
            if stop.requested or due:
                saved = save()
                if stop.requested:
                    raise Interrupted(
                        f"{stage} stopped at step {step} of {total}; checkpoint {saved}; go on with --resume"
                    )
    require_finite_weights(model, stage, step, latest_checkpoint(run.checkpoints))
    return last
