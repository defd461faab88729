"""A recording on disk, the models in it, and the differences from it."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from fastrlhf.errors import UserError, brief
from fastrlhf.models import ScalarModel, ScalarModelConfig, disable_dropout

__all__ = ["Errors", "Recording", "build_optimizer", "choice", "load", "some", "unpad_left"]


class Recording:
    """A recording on disk. Raises `UserError` when it is missing, torn or of an unknown kind."""

    def __init__(self, basename: str) -> None:
        base = basename.removesuffix(".json").removesuffix(".safetensors")
        meta_path, tensor_path = Path(f"{base}.json"), Path(f"{base}.safetensors")
        try:
            if Path(base).is_dir():
                found = sorted(Path(base).rglob("update_*.json"))
                hint = f", such as {found[0].with_suffix('')}" if found else " without its ending"
                raise UserError(f"replay: {base} is a folder; give a recording's path{hint}")
            for path in (meta_path, tensor_path):
                if not path.is_file():
                    raise UserError(f"replay: {path} does not exist; give a recording's path without its ending")
            self._read(base, meta_path, tensor_path)
        except OSError as err:
            raise UserError(f"replay: cannot read {base}: {err.strerror or err}") from err
        self.base = base

    def _read(self, base: str, meta_path: Path, tensor_path: Path) -> None:
        try:
            self.meta: dict[str, Any] = json.loads(meta_path.read_text(encoding="utf-8"))
            with safe_open(tensor_path, "pt") as file:
                self.tensors: dict[str, Tensor] = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except (ValueError, RecursionError, SafetensorError) as err:  # ValueError: JSON, UTF-8, a number too long
            raise UserError(f"replay: {base} is not a readable recording: {brief(err)}") from err
        if not isinstance(self.meta, dict) or self.meta.get("kind") not in ("ppo", "sft", "reward"):
            kind = self.meta.get("kind") if isinstance(self.meta, dict) else None
            raise UserError(f"replay: {meta_path} has kind {kind!r}; ppo, sft and reward can be replayed")
        missing = [key for key in ("args", "model") if key not in self.meta]
        if missing:
            raise UserError(f"replay: {meta_path} lacks {missing[0]!r}; it is not a whole recording")

    def get(self, key: str, dtype: torch.dtype) -> Tensor:
        """One tensor. Raises `UserError` when it is missing or of another type."""
        if key not in self.tensors:
            raise UserError(f"replay: {self.base}.safetensors lacks {key!r}; it is not a whole recording")
        got = self.tensors[key]
        if got.dtype != dtype:
            raise UserError(f"replay: {self.base}.safetensors: {key!r} is {got.dtype}, it has to be {dtype}")
        return got

    def ids(self, key: str) -> Tensor:
        """Token ids or row numbers."""
        return self.get(key, torch.int64)

    def weights(self, prefix: str) -> dict[str, Tensor]:
        """The tensors under `prefix.`, by the rest of their names."""
        cut = len(prefix) + 1
        return {k[cut:]: v for k, v in self.tensors.items() if k.startswith(prefix + ".")}

    def _attn(self) -> dict[str, str]:
        # Where a recording does not say, the plain sums: those of fused attention on CPUs differ more, by CPU.
        return {"attn_implementation": self.meta.get("attn", "eager")}

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


def choice(values: Mapping[str, Any], key: str, allowed: Collection[str]) -> str:
    """`values[key]`, or the first of `allowed`, which is what the reference does."""
    got = values.get(key, next(iter(allowed)))
    if got not in allowed:
        raise UserError(f"replay: {key} is {got!r}; {' and '.join(allowed)} can be replayed")
    return str(got)


def some(rec: Recording, key: str) -> list[dict[str, Any]]:
    """The recorded micro-batches or updates; a recording without any would pass with nothing compared."""
    if not rec.meta[key]:
        raise UserError(f"replay: {rec.base} holds no {key}; it is not a whole recording")
    return list(rec.meta[key])


def build_optimizer(modules: nn.Module, args: Mapping[str, Any]) -> torch.optim.Optimizer:
    params = list(modules.parameters())
    name = args.get("optimizer", "adamw")
    if name == "adamw":
        return torch.optim.AdamW(
            params, lr=args["lr"], eps=args["eps"], weight_decay=args.get("weight_decay", 0.01), fused=True
        )
    if name == "adam":
        return torch.optim.Adam(params, lr=args["lr"], eps=args["eps"], fused=True)
    raise UserError(f"replay: optimizer {name!r} is unknown; adam and adamw can be replayed")


def unpad_left(row: np.ndarray, pad_id: int, what: str) -> np.ndarray:
    kept = row[int(np.argmax(row != pad_id)) :] if (row != pad_id).any() else row[:0]
    if len(kept) == 0:
        raise UserError(f"replay: {what} is all padding; there is no position to predict from")
    if (kept == pad_id).any():
        raise UserError(f"replay: {what} has padding between its tokens; only padding on the left can be replayed")
    return kept
