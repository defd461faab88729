"""What a run shows and writes while it goes: metrics.jsonl, samples.jsonl, TensorBoard, W&B, trackio, progress.

docs/metrics.md says what each name means.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import yaml
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from fastrlhf.config import LogConfig
from fastrlhf.errors import UserError, brief
from fastrlhf.run_folder import RunFolder, atomic_write_text, disk_errors

__all__ = ["Metrics", "require_packages"]

_PLAIN_SECONDS = 5.0
# What a line of progress shows, if the stage has it.
_SHOWN = {
    "train/sft/loss": "loss",
    "train/rm/loss": "loss",
    "train/rm/accuracy": "accuracy",
    "objective/scores": "reward",
    "objective/kl": "KL",
    "tokens_per_second": "tokens/s",
}


class Metrics:
    """Metrics of one stage. Lines carry the stage and the step; a resumed stage first drops what is past its
    checkpoint, so that no step stands twice."""

    def __init__(self, run: RunFolder, log: LogConfig, *, stage: str, total_steps: int, resume_step: int = 0) -> None:
        self.stage, self.total, self.log_config = stage, total_steps, log
        self.metrics_path, self.samples_path = run.root / "metrics.jsonl", run.root / "samples.jsonl"
        for path in (self.metrics_path, self.samples_path):
            _cut(path, stage, resume_step)
        self.writers = _writers(run, log, stage, resume_step)
        terminal = sys.stdout.isatty() and log.progress == "auto"
        self.progress = _progress(stage, total_steps, resume_step) if terminal or log.progress == "rich" else None
        self.said = 0.0

    def __enter__(self) -> Metrics:
        if self.progress is not None:
            self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.progress is not None:
            self.progress.stop()
        for writer in self.writers:
            writer.close()

    def log(self, step: int, values: Mapping[str, float | Tensor]) -> dict[str, float]:
        """Write one step's values (numbers or 0-d tensors, which are moved to the host in one transfer)."""
        tensors = {k: v for k, v in values.items() if isinstance(v, Tensor)}
        out = {k: float(v) for k, v in values.items() if not isinstance(v, Tensor)}
        if tensors:
            moved = torch.stack([t.detach().double() for t in tensors.values()]).tolist()
            out |= dict(zip(tensors, moved, strict=True))
        out = {k: out[k] for k in values}
        _append(self.metrics_path, [{"stage": self.stage, "step": step, "time": round(time.time(), 3), **out}])
        for writer in self.writers:
            writer.write(step, out)
        self._show(step, out)
        return out

    def samples(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows to samples.jsonl."""
        _append(self.samples_path, [{"stage": self.stage, "step": step, **row} for row in rows])

    def _show(self, step: int, values: Mapping[str, float]) -> None:
        shown = [f"{label} {values[name]:.4g}" for name, label in _SHOWN.items() if name in values]
        if self.progress is not None:
            self.progress.update(self.progress.task_ids[0], completed=step, shown="  ".join(shown))
            return
        now = time.monotonic()
        if now - self.said >= _PLAIN_SECONDS or step == self.total:
            self.said = now
            print(f"{self.stage} {step}/{self.total}  " + "  ".join(shown), flush=True)


def _progress(stage: str, total: int, done: int) -> Progress:
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[shown]}"),
        TimeRemainingColumn(),
    )
    progress.add_task(stage, total=total, completed=done, shown="")
    return progress


def _append(path: Path, rows: list[dict[str, Any]]) -> None:
    with disk_errors(path), path.open("a", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _cut(path: Path, stage: str, step: int) -> None:
    """Drop this stage's lines past `step`, and a last line that a kill tore."""
    if not path.exists():
        return
    kept = []
    # Not splitlines: a Unicode line separator inside a sample is not the end of a row.
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            continue
        if row.get("stage") != stage or row["step"] <= step:
            kept.append(line + "\n")
    atomic_write_text(path, "".join(kept))


class _TensorBoard:
    def __init__(self, folder: Path, purge_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder), purge_step=purge_step or None)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


def require_packages(log: LogConfig) -> None:
    """Raise `UserError` for a tracker whose package is not installed."""
    for name in ("wandb", "trackio"):
        if not getattr(log, name):
            continue
        try:
            importlib.import_module(name)
        except ImportError as err:
            raise UserError(f"log.{name} needs a package; pip install 'fastrlhf[{name}]' or set it to false") from err


class _Tracker:
    """A run of W&B or of trackio, which has the same two methods."""

    def __init__(self, run: Any) -> None:
        self.run = run

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def close(self) -> None:
        self.run.finish()


def _wandb(run: RunFolder, log: LogConfig, stage: str) -> _Tracker:
    import wandb

    identity, config = _identity(run), _resolved(run)
    try:
        begun = wandb.init(
            project=log.project,
            name=f"{run.root.name}/{stage}",
            id=f"{identity}-{stage}",
            dir=str(run.root),
            config=config,
            resume="allow",
        )
    except Exception as err:  # no key, no network, a value in the environment that it does not know
        raise UserError(
            f"log.wandb: {brief(err)} (WANDB_MODE=offline logs into the run folder without an account)"
        ) from err
    return _Tracker(begun)


def _trackio(run: RunFolder, log: LogConfig, stage: str) -> _Tracker:
    import trackio

    identity, config = _identity(run), _resolved(run)
    name = f"{run.root.name}-{stage}-{identity}"  # trackio finds a run to resume by its name alone
    try:
        begun = trackio.init(project=log.project, name=name, config=config, resume="allow")
    except Exception as err:  # whatever keeps it from starting
        raise UserError(f"log.trackio: {brief(err)}") from err
    return _Tracker(begun)


def _identity(run: RunFolder) -> str:
    """What a resumed run shares with the run it goes on with, and no other run of the same folder name."""
    path = run.root / ".tracking-id"
    if not path.exists():
        atomic_write_text(path, uuid.uuid4().hex[:8])
    return path.read_text(encoding="utf-8")


def _resolved(run: RunFolder) -> dict[str, Any]:
    return dict(yaml.safe_load((run.root / "config.yaml").read_text(encoding="utf-8")))


def _writers(run: RunFolder, log: LogConfig, stage: str, step: int) -> list[Any]:
    require_packages(log)
    writers: list[Any] = []
    if log.tensorboard:
        writers.append(_TensorBoard(run.root / "tensorboard" / stage, step + 1 if step else 0))
    if log.wandb:
        writers.append(_wandb(run, log, stage))
    if log.trackio:
        writers.append(_trackio(run, log, stage))
    return writers
