"""token_logprobs: logits and ids to log-probabilities (and entropy), without keeping a softmax.

N = rows, V = vocabulary, n = rows of one chunk. The row arithmetic (`row_stats_`, `row_grad_`) is shared with
linear_logprobs.py; it destroys its argument, which is always scratch and never the caller's tensor.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastrlhf_kernels._backend import (
    check_float,
    check_integer,
    check_number,
    compute_dtype,
    debug_true,
    resolve_backend,
)

# Row arithmetic makes several passes over a chunk: on a CPU it should stay in the core's own cache (1 to 16 MiB
# measure the same at V = 50304).
CPU_CHUNK_BYTES = 4 << 20
DEVICE_CHUNK_BYTES = 64 << 20


class LogprobsAndEntropy(NamedTuple):
    logprobs: Tensor
    entropy: Tensor


def exp_floor(dtype: torch.dtype) -> float:
    """Where exp(x) is taken as 0: e^18 above the smallest normal number.

    Denormal probabilities cost more than they are worth: products with them are denormal too, and a CPU GEMM
    over such numbers runs many times slower.
    """
    return math.log(torch.finfo(dtype).tiny) + 18


def row_stats_(x_nV: Tensor, spare_nV: Tensor | None, ids_n: Tensor) -> tuple[Tensor, Tensor | None]:
    """Log-probability of `ids_n` and, with a spare buffer, entropy of each row of logits. Destroys `x_nV`."""
    torch.log_softmax(x_nV, 1, out=x_nV)
    target_n = x_nV.gather(1, ids_n[:, None]).squeeze(1)
    if spare_nV is None:
        return target_n, None
    torch.exp(x_nV.clamp_(min=exp_floor(x_nV.dtype)), out=spare_nV)  # clamped: 0 * -inf would be NaN
    return target_n, x_nV.mul_(spare_nV).sum(1).neg_()


def row_grad_(
    x_nV: Tensor,
    spare_nV: Tensor | None,
    ids_n: Tensor,
    logprobs_n: Tensor,
    grad_n: Tensor,
    entropy_n: Tensor | None = None,
    grad_entropy_n: Tensor | None = None,
) -> Tensor:
    """Turn logits into their gradient, up to a factor per row, in place; return that factor.

    Log-probability alone: x becomes p - onehot and the factor is -grad, so that a caller that multiplies matrices
    can put the factor on the narrow side. The target's entry is expm1(logprob): p - 1 cancels when p is near 1.
    With entropy: d entropy / dx = -p (log p + H), and the factor is 1.
    """
    floor = exp_floor(x_nV.dtype)
    target_n = logprobs_n.expm1()
    if grad_entropy_n is None or entropy_n is None:
        torch.softmax(x_nV, 1, out=x_nV)
        torch.threshold_(x_nV, 2 * math.exp(floor), 0.0)
        x_nV.scatter_(1, ids_n[:, None], target_n[:, None])
        return -grad_n
    assert spare_nV is not None
    torch.log_softmax(x_nV, 1, out=x_nV)
    torch.exp(x_nV.clamp_(min=floor), out=spare_nV)
    torch.threshold_(spare_nV, 2 * math.exp(floor), 0.0)
    # p * (-gH * (log p + H) - g), the target's entry apart
    x_nV.mul_(-grad_entropy_n[:, None]).sub_((grad_entropy_n * entropy_n + grad_n)[:, None]).mul_(spare_nV)
    entropy_part_n = -grad_entropy_n * logprobs_n.exp() * (logprobs_n.clamp(min=floor) + entropy_n)
    x_nV.scatter_(1, ids_n[:, None], (entropy_part_n - grad_n * target_n)[:, None])
    return torch.ones_like(grad_n)


def split_ids(ids_N: Tensor, V: int, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    """(ids safe to gather with, rows that count, rows whose id is outside the vocabulary)."""
    ids_N = ids_N.long()
    ignored_N = ids_N == ignore_index
    inside_N = (ids_N >= 0) & (ids_N < V)
    keep_N = inside_N & ~ignored_N
    return torch.where(keep_N, ids_N, 0), keep_N, ~inside_N & ~ignored_N


def masked_rows(x_N: Tensor, keep_N: Tensor, outside_N: Tensor) -> Tensor:
    """`x_N` where it counts, NaN where the id is outside the vocabulary, 0 where ignored."""
    return torch.where(keep_N, x_N, torch.where(outside_N, math.nan, 0.0).to(x_N.dtype))


def row_views(x: Tensor) -> list[Tensor]:
    """2-D views that cover `x` [..., V] in row order, as few as its strides allow; never a copy."""
    if x.dim() == 1:
        return [x[None]]
    mergeable = all(x.stride(i) == x.stride(i + 1) * x.size(i + 1) for i in range(x.dim() - 2))
    if mergeable or x.numel() == 0:
        return [x.reshape(math.prod(x.shape[:-1]), x.shape[-1])]
    return [view for part in x.unbind(0) for view in row_views(part)]


def row_chunks(x: Tensor, dtype: torch.dtype) -> list[tuple[int, Tensor]]:
    """(first row, 2-D view) pairs, small enough for the row arithmetic."""
    budget = CPU_CHUNK_BYTES if x.device.type == "cpu" else DEVICE_CHUNK_BYTES
    rows = max(1, budget // (x.shape[-1] * dtype.itemsize))
    chunks, first = [], 0
    for view in row_views(x):
        for part in view.split(rows):
            chunks.append((first, part))
            first += len(part)
    return chunks


def check_temperature(temperature: float | Tensor, ids: Tensor, ignore_index: int, debug: bool) -> None:
    if not isinstance(temperature, Tensor):
        check_number("temperature", temperature, 0, open_low=True)
        return
    if temperature.dim() > 0:
        check_float("temperature", temperature, tuple(ids.shape), "ids")
    else:
        check_float("temperature", temperature)
    if temperature.requires_grad:
        raise ValueError("temperature must not require a gradient: none is computed")
    if debug:
        fine = (temperature > 0) & torch.isfinite(temperature)
        debug_true("temperature", fine | (ids == ignore_index), "must be positive and finite")


def inverse_temperature(temperature: float | Tensor, keep_N: Tensor, dtype: torch.dtype) -> float | Tensor:
    """1 / temperature: a Python float, or one number per row (1 at ignored rows, whose entry may be anything)."""
    if not isinstance(temperature, Tensor):
        return 1.0 / temperature
    return torch.where(keep_N, temperature.to(dtype).reciprocal().flatten(), 1.0)  # one temperature broadcasts


def check_ids(ids: Tensor, shape: tuple[int, ...], of: str, V: int, ignore_index: int, debug: bool) -> None:
    check_integer("ids", ids, shape, of)
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise ValueError(f"ignore_index must be an int, got {type(ignore_index).__name__}")
    if debug:
        debug_true("ids", (ids == ignore_index) | ((ids >= 0) & (ids < V)), f"must be in [0, {V}) or {ignore_index}")


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, ids_N, temperature, ignore_index, with_entropy):
        dtype = compute_dtype(logits)
        ids_N, keep_N, outside_N = split_ids(ids_N, logits.shape[-1], ignore_index)
        scale = inverse_temperature(temperature, keep_N, dtype)
        logprobs_N = torch.empty(len(ids_N), dtype=dtype, device=logits.device)
        entropy_N = torch.empty_like(logprobs_N) if with_entropy else None
        chunks = row_chunks(logits, dtype)
        buffer = _scratch(chunks, logits, dtype)
        spare = torch.empty_like(buffer) if with_entropy else None
        for first, part_nV in chunks:
            n = len(part_nV)
            rows = slice(first, first + n)
            x_nV = _scale_(buffer[:n].copy_(part_nV), scale, rows)
            logprobs_N[rows], entropy_n = row_stats_(x_nV, None if spare is None else spare[:n], ids_N[rows])
            if entropy_N is not None and entropy_n is not None:
                entropy_N[rows] = entropy_n
        logprobs_N = masked_rows(logprobs_N, keep_N, outside_N)
        if entropy_N is not None:
            entropy_N = masked_rows(entropy_N, keep_N, outside_N)
        scale_N = scale if isinstance(scale, Tensor) else None
        ctx.save_for_backward(logits, ids_N, keep_N, logprobs_N, entropy_N, scale_N)
        ctx.scale = None if scale_N is not None else scale
        ctx.set_materialize_grads(False)
        return logprobs_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_N, grad_entropy_N):
        logits, ids_N, keep_N, logprobs_N, entropy_N, scale_N = ctx.saved_tensors
        if grad_N is None and grad_entropy_N is None:
            return None, None, None, None, None
        scale = ctx.scale if scale_N is None else scale_N
        dtype = logprobs_N.dtype
        grad_N = torch.zeros_like(logprobs_N) if grad_N is None else grad_N
        logprobs_N, grad_N = (torch.where(keep_N, x, 0.0) for x in (logprobs_N, grad_N))
        if grad_entropy_N is not None:
            entropy_N, grad_entropy_N = (torch.where(keep_N, x, 0.0) for x in (entropy_N, grad_entropy_N))
        dlogits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        dlogits_NV = dlogits.view(len(ids_N), logits.shape[-1])
        chunks = row_chunks(logits, dtype)
        # fp32 rows become their gradient where it is wanted; narrower ones need scratch to compute in.
        buffer = None if logits.dtype == dtype else _scratch(chunks, logits, dtype)
        spare = None if grad_entropy_N is None else _scratch(chunks, logits, dtype)
        zero = torch.zeros(1, dtype=dtype, device=logits.device)  # 1-D, so that `where` widens to it
        for first, part_nV in chunks:
            n = len(part_nV)
            rows = slice(first, first + n)
            x_nV = dlogits_NV[rows] if buffer is None else buffer[:n]
            # An ignored row may hold NaN, and NaN * 0 is not 0.
            torch.where(keep_N[rows, None], part_nV, zero, out=x_nV)
            factor_n = row_grad_(
                _scale_(x_nV, scale, rows),
                None if spare is None else spare[:n],
                ids_N[rows],
                logprobs_N[rows],
                grad_N[rows],
                None if entropy_N is None else entropy_N[rows],
                None if grad_entropy_N is None else grad_entropy_N[rows],
            )
            factor_n = factor_n * (scale[rows] if isinstance(scale, Tensor) else scale)
            torch.mul(x_nV, torch.where(keep_N[rows], factor_n, 0.0)[:, None], out=dlogits_NV[rows])
        return dlogits, None, None, None, None


def _scratch(chunks: list[tuple[int, Tensor]], logits: Tensor, dtype: torch.dtype) -> Tensor:
    rows = max((len(part) for _, part in chunks), default=0)
    return torch.empty(rows, logits.shape[-1], dtype=dtype, device=logits.device)


def _scale_(x_nV: Tensor, scale: float | Tensor, rows: slice) -> Tensor:
    if isinstance(scale, Tensor):
        return x_nV.mul_(scale[rows, None])
    return x_nV if scale == 1.0 else x_nV.mul_(scale)


def token_logprobs(
    logits: Tensor,
    ids: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    ignore_index: int = -100,
    return_entropy: bool = False,
    backend: str = "auto",
    debug: bool = False,
) -> Tensor | LogprobsAndEntropy:
    """log softmax(logits / temperature) at `ids`, and the entropy of that distribution on request.

    logits [..., V] fp32, bf16, fp16 or fp64, unit stride over V, any other strides; ids [...] int64 or int32.
    `temperature` is a float or a tensor like ids. Returns fp32 (fp64 for fp64 logits) [...]. Differentiable in
    `logits`. Rows with `ignore_index` give 0 and no gradient; ids outside [0, V) give NaN and no gradient.
    """
    check_float("logits", logits)
    if logits.dim() == 0 or logits.shape[-1] == 0:
        raise ValueError(f"logits must be [..., V] with V > 0, got {tuple(logits.shape)}")
    V = logits.shape[-1]
    if logits.stride(-1) != 1 and V > 1 and logits.numel() > 0:
        raise ValueError(f"logits must have unit stride over the vocabulary, got strides {logits.stride()}")
    check_ids(ids, tuple(logits.shape[:-1]), "logits", V, ignore_index, debug)
    check_temperature(temperature, ids, ignore_index, debug)
    if debug:
        debug_true("logits", (logits < math.inf).all(-1) | (ids == ignore_index), "must be finite or -inf")
    resolve_backend(backend, logits.device)
    logprobs_N, entropy_N = _TokenLogprobs.apply(logits, ids.reshape(-1), temperature, ignore_index, return_entropy)
    logprobs = logprobs_N.view(ids.shape)
    return LogprobsAndEntropy(logprobs, entropy_N.view(ids.shape)) if return_entropy else logprobs
