"""masked_whiten: mean 0 and variance 1 over the slots of a mask."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrlhf_kernels._backend import (
    check_float,
    check_mask,
    check_number,
    compute_dtype,
    debug_finite,
    resolve_backend,
)


def whiten(values: Tensor, mask: Tensor, shift_mean: bool, eps: float) -> Tensor:
    """The arithmetic without the checks; `gae_whiten` uses it too."""
    x = torch.where(mask, values.to(compute_dtype(values)), 0.0)
    n = mask.sum().clamp(min=1)
    mean = x.sum() / n
    centred = torch.where(mask, x - mean, 0.0)
    out = centred * torch.rsqrt(centred.square().sum() / n + eps)
    return out if shift_mean else torch.where(mask, out + mean, 0.0)


def masked_whiten(
    values: Tensor,
    mask: Tensor,
    *,
    shift_mean: bool = True,
    eps: float = 1e-8,
    backend: str = "auto",
    debug: bool = False,
) -> Tensor:
    """(values - mean) / sqrt(var + eps) over `mask`, with the biased variance; plus the mean without `shift_mean`.

    values any shape; mask bool, the same shape. Returns fp32 (fp64 for fp64 values), exactly 0 outside the mask,
    whatever `values` holds there; an empty mask gives zeros. Differentiable in `values`.
    """
    check_float("values", values)
    check_mask("mask", mask, tuple(values.shape), "values")
    check_number("eps", eps, 0)
    if debug:
        debug_finite("values", values, mask)
    resolve_backend(backend, values.device)
    return whiten(values, mask, shift_mean, eps)
