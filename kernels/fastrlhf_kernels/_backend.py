"""What every op does at its public door: choose the backend, check the arguments.

Shapes, dtypes and Python scalars are always checked; values inside tensors only with `debug=True`, because
looking at them on a GPU costs a synchronisation.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

Backend = Literal["auto", "eager"]


def which_backend(device: torch.device | str = "cpu") -> str:
    """The backend that `backend="auto"` means on `device`."""
    return resolve_backend("auto", torch.device(device))


def resolve_backend(requested: str, device: torch.device) -> str:
    """Turn the caller's `backend` into the one that runs; never falls back from an explicit request."""
    if requested not in get_args(Backend):
        raise ValueError(f"backend {requested!r} does not exist; there are {', '.join(map(repr, get_args(Backend)))}")
    return "eager" if requested == "auto" else requested


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """The dtype arithmetic runs in: at least fp32, fp64 if any input is."""
    dtype = torch.float32
    for tensor in tensors:
        if tensor is not None:
            dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def check_float(name: str, tensor: Tensor, shape: tuple[int, ...] | None = None, of: str = "") -> None:
    """`tensor` is floating point and, if `shape` is given, has exactly that shape (that `of` something)."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise ValueError(f"{name} must be a floating-point tensor, got {got}")
    if shape is not None:
        check_shape(name, tensor, shape, of)


def check_shape(name: str, tensor: Tensor, shape: tuple[int, ...], of: str = "") -> None:
    if tuple(tensor.shape) != tuple(shape):
        why = f" to match {of}" if of else ""
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {tuple(shape)}{why}")


def check_mask(name: str, mask: Tensor, shape: tuple[int, ...], of: str) -> None:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"{name} must be a bool tensor, got {got}")
    check_shape(name, mask, shape, of)


def check_integer(name: str, tensor: Tensor, shape: tuple[int, ...], of: str) -> None:
    if not isinstance(tensor, Tensor) or tensor.dtype not in (torch.int64, torch.int32):
        got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise ValueError(f"{name} must be an int64 or int32 tensor, got {got}")
    check_shape(name, tensor, shape, of)


def check_number(
    name: str, value: float, low: float = -math.inf, high: float = math.inf, *, open_low: bool = False
) -> None:
    """`value` is a finite Python number in [low, high], or in (low, high] with `open_low`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} must be a Python number, got {type(value).__name__}")
    if not math.isfinite(value) or value < low or value > high or (open_low and value == low):
        raise ValueError(f"{name}={value} must be finite and in {'(' if open_low else '['}{low}, {high}]")


def debug_finite(name: str, tensor: Tensor, valid: Tensor | None = None) -> None:
    """Host check (synchronises): `tensor` is finite wherever `valid`."""
    bad = ~torch.isfinite(tensor) if valid is None else ~torch.isfinite(tensor) & valid
    if bool(bad.any()):
        raise ValueError(f"{name} is not finite at {int(bad.sum())} valid slots, first at {bad.nonzero()[0].tolist()}")


def debug_true(name: str, ok: Tensor, what: str) -> None:
    """Host check (synchronises): every element of `ok` holds."""
    if not bool(ok.all()):
        raise ValueError(f"{name}: {what}; {int((~ok).sum())} offenders, first at {(~ok).nonzero()[0].tolist()}")
