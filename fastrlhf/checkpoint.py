"""Checkpoints: everything a run needs to go on bit for bit, written whole or not at all.

`step_XXXXXXXX/` holds a safetensors file for each module, for the optimiser and for the random states,
`state.json`, and `manifest.json` with the size and checksum of every file. No pickle anywhere.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fastrlhf.errors import UserError
from fastrlhf.run_folder import disk_errors

__all__ = ["StopSignal", "digest", "latest_checkpoint", "load_checkpoint", "named_generator", "save_checkpoint"]

_PREFIX = "step_"


def named_generator(seed: int, name: str) -> torch.Generator:
    """A CPU generator of its own for each named stream of a run."""
    hashed = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(hashed[:8], "little") >> 1)


def _unique(module: nn.Module) -> dict[str, Tensor]:
    """The state without the second names of tied tensors."""
    seen: set[tuple[int, tuple[int, ...]]] = set()
    out = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        key = (tensor.data_ptr(), tuple(tensor.shape))
        if tensor.numel() == 0:
            raise ValueError(f"{name} has zero size; a sharded weight must be gathered before it is saved")
        if key not in seen:
            seen.add(key)
            out[name] = tensor.detach().contiguous()
    return out


def _optimizer_state(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    state = optimizer.state_dict()
    tensors = {f"{i}.{key}": value.contiguous() for i, slot in state["state"].items() for key, value in slot.items()}
    return tensors, {"param_groups": state["param_groups"]}


def _random_state(generators: Mapping[str, torch.Generator]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors = {f"generator.{name}": g.get_state() for name, g in generators.items()}
    tensors["torch"] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    kind, keys, pos, has_gauss, cached = np.random.get_state()
    tensors["numpy"] = torch.from_numpy(np.asarray(keys).view(np.int32).copy())
    version, words, gauss = random.getstate()
    return tensors, {"numpy": [kind, int(pos), int(has_gauss), float(cached)], "python": [version, list(words), gauss]}


def save_checkpoint(
    folder: Path,
    step: int,
    *,
    modules: Mapping[str, nn.Module],
    optimizer: torch.optim.Optimizer,
    generators: Mapping[str, torch.Generator],
    state: Mapping[str, Any],
    keep: int,
) -> Path:
    """Write `folder/step_XXXXXXXX` under a temporary name, rename it, then remove all but the `keep` newest.

    Raises `UserError` for a full disk; older checkpoints are then untouched.
    """
    final = folder / f"{_PREFIX}{step:08d}"
    tmp = folder / f".tmp-{final.name}"
    optimizer_tensors, optimizer_meta = _optimizer_state(optimizer)
    random_tensors, random_meta = _random_state(generators)
    meta = {"state": dict(state), "optimizer": optimizer_meta, "random": random_meta, "torch": torch.__version__}
    with disk_errors(final):
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(tmp, ignore_errors=True)
        tmp.mkdir()
        try:
            for name, module in modules.items():
                save_file(_unique(module), tmp / f"{name}.safetensors")
            save_file(optimizer_tensors, tmp / "optimizer.safetensors")
            save_file(random_tensors, tmp / "random.safetensors")
            (tmp / "state.json").write_text(json.dumps(meta), encoding="utf-8")
            manifest = {p.name: [p.stat().st_size, _checksum(p)] for p in sorted(tmp.iterdir())}
            (tmp / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
            for path in tmp.iterdir():
                _sync(path)
        except BaseException:
            shutil.rmtree(tmp, ignore_errors=True)
            raise
        if final.exists():  # a resumed run comes by the same step again
            shutil.rmtree(final)
        os.rename(tmp, final)
        _sync(folder)
    for old in _all(folder)[:-keep] if keep > 0 else []:
        shutil.rmtree(old)
    return final


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _checksum(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            crc = zlib.crc32(block, crc)
    return crc


def _all(folder: Path) -> list[Path]:
    found = folder.glob(f"{_PREFIX}*") if folder.is_dir() else []
    return sorted(path for path in found if path.name.removeprefix(_PREFIX).isdecimal())


def digest(rows: Iterable[np.ndarray]) -> str:
    """Of token rows: whether a resumed run has the data it began with."""
    total = hashlib.sha256()
    for row in rows:
        total.update(len(row).to_bytes(8, "little"))
        total.update(np.ascontiguousarray(row, dtype=np.int64).tobytes())
    return total.hexdigest()


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint; a rename makes it whole, so there is no half one."""
    found = _all(folder)
    return found[-1] if found else None


def _verify(path: Path) -> None:
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        files = [(str(name), int(size), int(checksum)) for name, (size, checksum) in manifest.items()]
        if not files:
            raise ValueError("it lists no file")
    except (OSError, ValueError, TypeError, AttributeError) as err:
        raise UserError(
            f"checkpoint {path} is damaged (manifest.json); remove the folder to go on from the one before"
        ) from err
    for name, size, checksum in files:
        file = path / name
        if not file.is_file() or file.stat().st_size != size or _checksum(file) != checksum:
            raise UserError(f"checkpoint {path} is damaged ({name}); remove the folder to go on from the one before")


def load_checkpoint(
    path: Path,
    *,
    modules: Mapping[str, nn.Module],
    optimizer: torch.optim.Optimizer,
    generators: Mapping[str, torch.Generator],
) -> dict[str, Any]:
    """Restore everything in place and return the saved state.

    Raises `UserError` for a damaged checkpoint or one that does not fit the models.
    """
    _verify(path)
    meta = json.loads((path / "state.json").read_text(encoding="utf-8"))
    for name, module in modules.items():
        _load_module(module, load_file(path / f"{name}.safetensors"), f"{path}/{name}")
    saved = load_file(path / "optimizer.safetensors")
    slots: dict[int, dict[str, Tensor]] = {}
    for key, value in saved.items():
        index, _, field = key.partition(".")
        slots.setdefault(int(index), {})[field] = value
    groups = meta["optimizer"]["param_groups"]
    for group in groups:
        group["betas"] = tuple(group["betas"])
    optimizer.load_state_dict({"state": slots, "param_groups": groups})
    _restore_random(load_file(path / "random.safetensors"), meta["random"], generators, path)
    return meta["state"]


def _load_module(module: nn.Module, tensors: dict[str, Tensor], where: str) -> None:
    ours = _unique(module)
    missing, unexpected = sorted(ours.keys() - tensors.keys()), sorted(tensors.keys() - ours.keys())
    if missing or unexpected:
        raise UserError(
            f"checkpoint {where} does not fit the model: missing {missing[:2]}, unexpected {unexpected[:2]}"
        )
    other = [name for name, tensor in ours.items() if tensor.shape != tensors[name].shape]
    if other:
        raise UserError(f"checkpoint {where} does not fit the model: {other[0]} has another shape")
    module.load_state_dict(tensors, strict=False)  # the second name of a tied tensor is not in the file


def _restore_random(
    tensors: dict[str, Tensor], meta: dict[str, Any], generators: Mapping[str, torch.Generator], path: Path
) -> None:
    for name, generator in generators.items():
        if f"generator.{name}" not in tensors:
            raise UserError(f"checkpoint {path} lacks the random stream {name!r}; it was written by another version")
        generator.set_state(tensors[f"generator.{name}"])
    torch.set_rng_state(tensors["torch"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])
    kind, pos, has_gauss, cached = meta["numpy"]
    np.random.set_state((kind, tensors["numpy"].numpy().view(np.uint32), pos, has_gauss, cached))
    version, words, gauss = meta["python"]
    random.setstate((version, tuple(words), gauss))


class StopSignal:
    """SIGINT and SIGTERM only raise a flag, which the loop reads once per step; a second one acts as usual."""

    def __init__(self) -> None:
        self.requested = False
        self._old: dict[int, Any] = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        signal.signal(number, self._old[number])

    def __enter__(self) -> StopSignal:
        import threading

        # Only the main thread may install handlers; called from another one, signals keep their usual meaning.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._old[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, old in self._old.items():
            signal.signal(number, old)
