"""The PPO run: rollout, experience and update in turn, with checkpoints, metrics and recordings.

B = episodes of one update, T = response slots.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from fastrlhf.checkpoint import StopSignal, digest, latest_checkpoint, load_checkpoint, named_generator, save_checkpoint
from fastrlhf.config import BatchSizes, Config
from fastrlhf.data.batching import PromptStream
from fastrlhf.data.tokenize import PromptExample
from fastrlhf.errors import UserError
from fastrlhf.evaluate.sampling import Samples, sample
from fastrlhf.metrics import Metrics
from fastrlhf.optimizer import adamw
from fastrlhf.ppo import Experience, PPOModels, Settings, make_experience, optimize, score
from fastrlhf.recording import Recorder
from fastrlhf.rollout.decode import NotFiniteError
from fastrlhf.run_folder import RunFolder
from fastrlhf.training import Interrupted, diverged, require_finite, require_finite_weights

__all__ = ["ppo_settings", "train_ppo"]

ScoreFunction = Callable[[list[str], list[str]], Sequence[float]]


def ppo_settings(cfg: Config) -> Settings:
    return Settings(
        ppo=cfg.ppo,
        temperature=cfg.rollout.temperature + 1e-7,  # as the reference; exact greedy would divide by zero
        tokens_per_micro_batch=cfg.batch.tokens_per_micro_batch,
        tokens_per_forward=cfg.batch.tokens_per_forward,
        backend=cfg.kernels.backend,
    )


def train_ppo(
    models: PPOModels,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[PromptExample],
    cfg: Config,
    run: RunFolder,
    score_function: ScoreFunction | None = None,
) -> dict[str, float]:
    """Train policy and critic in place. Returns the last update's metrics.

    Raises `Interrupted` after a signal, and `UserError` on a loss or gradient that is not finite: what is kept is
    then the last checkpoint before that update.
    """
    sizes, settings = BatchSizes.derive(cfg), ppo_settings(cfg)
    device = models.policy.device
    trained = models.trained()
    optimizer = adamw(trained, lr=cfg.ppo.lr, eps=cfg.ppo.eps, weight_decay=cfg.ppo.weight_decay)
    generators = {name: named_generator(cfg.seed, f"ppo/{name}") for name in ("prompts", "sample", "minibatch")}
    stream = PromptStream(len(prompts), generators["prompts"])
    data = digest([p.query for p in prompts])
    done = 0
    last: dict[str, float] = {}
    checkpoint = latest_checkpoint(run.checkpoints) if cfg.resume else None
    if checkpoint is not None:
        state = load_checkpoint(checkpoint, modules=dict(trained.items()), optimizer=optimizer, generators=generators)
        done, last = state["update"], state["last"]
        try:
            stream.load_state_dict(state["prompts"])
        except ValueError as err:
            raise UserError(f"resume: ppo: {err}; restore the data") from err
        if state["data"] != data:
            raise UserError("resume: ppo: the prompts are not those that the run began with; restore the data")

    def save() -> Path:
        require_finite_weights(trained, "ppo", done, latest_checkpoint(run.checkpoints))
        return save_checkpoint(
            run.checkpoints,
            done,
            modules=dict(trained.items()),
            optimizer=optimizer,
            generators=generators,
            state={"update": done, "prompts": stream.state_dict(), "last": last, "data": data},
            keep=cfg.checkpoint.keep,
        )

    with (
        Metrics(run, cfg.log, stage="ppo", total_steps=sizes.updates, resume_step=done) as metrics,
        StopSignal() as stop,
    ):
        while done < sizes.updates:
            clock = _Clock(device)
            # 0. Linear decay: the first update runs at the full rate, the last one at lr/updates.
            lr = cfg.ppo.lr * (1 - done / sizes.updates)
            for group in optimizer.param_groups:
                group["lr"] = lr
            # 1. Rollout: sample, then score with the frozen and the trained models.
            batch = [prompts[i] for i in stream.take(sizes.rollout)]
            try:
                samples = sample(
                    models.policy,
                    tokenizer,
                    [p.query for p in batch],
                    cfg,
                    temperature=cfg.rollout.temperature,
                    generator=generators["sample"],
                )
            except NotFiniteError as err:
                diverged(f"ppo: {err} of update {done + 1}", latest_checkpoint(run.checkpoints))
            clock.lap("generate")
            given = None
            if score_function is not None:
                given = torch.tensor(list(score_function([p.text for p in batch], samples.texts)), dtype=torch.float32)
            scored = score(samples.rollout, models, settings, given)
            # 2.-9. Rewards, advantages, returns.
            experience = make_experience(samples.rollout, scored, settings)
            clock.lap("score")
            # 10. Epochs of minibatches.
            orders = [
                torch.randperm(sizes.rollout, generator=generators["minibatch"]).tolist() for _ in range(cfg.ppo.epochs)
            ]
            recorder = _recorder(cfg, run, done, sizes, models, optimizer, settings, tokenizer, lr)
            if recorder is not None:
                recorder.rollout(experience, orders)
            means = optimize(
                experience,
                models,
                optimizer,
                orders,
                minibatch_size=sizes.minibatch,
                micro_batch_size=sizes.micro_batch,
                settings=settings,
                observer=recorder.micro_batch if recorder is not None else None,
            )
            clock.lap("update")
            if recorder is not None:
                recorder.write()
            done += 1
            # 11. Statistics, moved to the host in one go.
            values = _statistics(experience, means, lr, done * cfg.batch.prompts_per_update, cfg.ppo.kl_coef)
            values |= clock.values(sum(samples.rollout.lengths), cfg.batch.prompts_per_update)
            last = metrics.log(done, values)
            kept = latest_checkpoint(run.checkpoints)
            require_finite(last, ["ppo/loss/policy_avg", "ppo/loss/value_avg", "ppo/grad_norm"], "ppo", done, kept)
            metrics.samples(done, _sample_rows(batch, samples, experience, cfg.log.samples))
            due = cfg.checkpoint.every and done % cfg.checkpoint.every == 0 and done < sizes.updates
            if stop.requested or due:
                saved = save()
                if stop.requested:
                    raise Interrupted(
                        f"ppo stopped at update {done} of {sizes.updates}; checkpoint {saved}; go on with --resume"
                    )
    require_finite_weights(trained, "ppo", done, latest_checkpoint(run.checkpoints))
    return last


def _recorder(
    cfg: Config,
    run: RunFolder,
    done: int,
    sizes: BatchSizes,
    models: PPOModels,
    optimizer: torch.optim.Optimizer,
    settings: Settings,
    tokenizer: PreTrainedTokenizerBase,
    lr: float,
) -> Recorder | None:
    if not cfg.ppo.record_rollouts:
        return None
    return Recorder(
        run.path / "recordings",
        update=done,
        updates=sizes.updates,
        models=models,
        optimizer=optimizer,
        settings=settings,
        minibatch_size=sizes.minibatch,
        micro_batch_size=sizes.micro_batch,
        pad_id=tokenizer.pad_token_id,
        eos_id=tokenizer.eos_token_id,
        lr=lr,
        lr0=cfg.ppo.lr,
    )


class _Clock:
    """Seconds of each phase; on a GPU the device is waited for at the end of a phase, three times per update."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.last = self.start = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self.laps[f"time/{name}"] = now - self.last
        self.last = now

    def values(self, tokens: int, episodes: int) -> dict[str, float]:
        seconds = time.perf_counter() - self.start
        return {**self.laps, "tokens_per_second": tokens / seconds, "ppo/eps": episodes / seconds}


def _statistics(exp: Experience, means: dict[str, Tensor], lr: float, episode: int, kl_coef: float) -> dict[str, Any]:
    """The reference's names; sums over kept tokens, means over episodes."""
    kl_B = exp.kl_BT.sum(1)
    non_score = -kl_coef * kl_B.mean()
    lengths = exp.mask_BT.sum(1).float()
    return {
        "objective/kl": kl_B.mean(),
        "objective/entropy": -exp.logprobs_BT.sum(1).mean(),
        "objective/non_score_reward": non_score,
        "objective/scores": exp.scores_B.mean(),
        "objective/score_total": non_score + exp.scores_B.mean(),
        "objective/response_length": lengths.mean(),
        "ppo/policy/approxkl_avg": means["approxkl"],
        "ppo/policy/clipfrac_avg": means["pg_clipfrac"],
        "ppo/loss/policy_avg": means["pg_loss"],
        "ppo/loss/value_avg": means["vf_loss"],
        "ppo/val/clipfrac_avg": means["vf_clipfrac"],
        "ppo/val/ratio": means["ratio"],
        "ppo/val/ratio_max": means["ratio_max"],
        "ppo/val/num_eos_tokens": exp.rollout.has_eos_B.sum(),
        "ppo/grad_norm": means["grad_norm"],
        "ppo/lr": lr,
        "ppo/episode": episode,
    }


def _sample_rows(batch: list[PromptExample], samples: Samples, exp: Experience, n: int) -> list[dict[str, Any]]:
    n = min(n, len(batch))
    if n == 0:
        return []
    numbers = torch.stack([exp.scores_B[:n], exp.kl_BT[:n].sum(1)]).tolist()
    return [
        {
            "prompt": batch[i].text,
            "response": samples.texts[i],
            "ended": samples.ended[i],
            "score": numbers[0][i],
            "kl": numbers[1][i],
        }
        for i in range(n)
    ]
