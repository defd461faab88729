"""linear_token_logprobs: hidden states and an output matrix to log-probabilities, one chunk of logits at a time.

N = rows, D = hidden size, V = vocabulary, n = rows of one chunk.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastrlhf_kernels._backend import check_float, check_number, compute_dtype, debug_finite, resolve_backend
from fastrlhf_kernels.logprobs import (
    LogprobsAndEntropy,
    check_ids,
    check_temperature,
    inverse_temperature,
    masked_rows,
    row_grad_,
    row_stats_,
    split_ids,
)

# Measured on two cores at 848 x 128 x 50304: about 128 rows keep the GEMM efficient and the chunk in cache;
# the whole 170 MB at once is 1.6 times slower per pass.
CPU_CHUNK_BYTES = 32 << 20


def _rows_per_chunk(N: int, V: int, itemsize: int, buffers: int, budget: int, device: torch.device) -> int:
    """Rows such that `buffers` chunks of logits fit the budget (one row at the least), in equal chunks."""
    if device.type == "cpu":
        budget = min(budget, CPU_CHUNK_BYTES * buffers)
    most = max(1, budget // (V * itemsize * buffers))
    return math.ceil(N / math.ceil(N / most)) if N else 1


class _Head:
    """The output matrix and what turns its product into scaled logits."""

    def __init__(self, weight, bias, softcap, scale, dtype):
        # A GEMM over bf16 inputs rounds its result to bf16 on a CPU, so the matrix is widened once.
        self.weight_VD = weight.to(dtype)
        self.bias_V = None if bias is None else bias.to(dtype)
        self.softcap, self.scale = softcap, scale

    def scale_of(self, rows: slice) -> float | Tensor:
        return self.scale[rows, None] if isinstance(self.scale, Tensor) else self.scale

    def logits_(self, out_nV: Tensor, hidden_nD: Tensor, rows: slice, slope_nV: Tensor | None = None) -> None:
        """softcap(hidden @ weight.T + bias) / temperature into `out_nV`; the softcap's slope into `slope_nV`."""
        scale = self.scale_of(rows)
        late = self.bias_V is not None or self.softcap is not None
        torch.mm(hidden_nD if late else hidden_nD * scale, self.weight_VD.t(), out=out_nV)
        if self.bias_V is not None:
            out_nV.add_(self.bias_V)
        if self.softcap is not None:
            out_nV.div_(self.softcap).tanh_()
            if slope_nV is not None:
                torch.mul(out_nV, out_nV, out=slope_nV).neg_().add_(1.0)
            out_nV.mul_(scale * self.softcap)
        elif self.bias_V is not None and (isinstance(scale, Tensor) or scale != 1.0):
            out_nV.mul_(scale)


class _LinearTokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, bias_V, ids_N, temperature, softcap, ignore_index, with_entropy, budget):
        N, V = len(hidden_ND), len(weight_VD)
        dtype = compute_dtype(hidden_ND, weight_VD)
        ids_N, keep_N, outside_N = split_ids(ids_N, V, ignore_index)
        scale = inverse_temperature(temperature, keep_N, dtype)
        head = _Head(weight_VD, bias_V, softcap, scale, dtype)
        logprobs_N = torch.empty(N, dtype=dtype, device=hidden_ND.device)
        entropy_N = torch.empty_like(logprobs_N) if with_entropy else None
        n = _rows_per_chunk(N, V, dtype.itemsize, 1 + with_entropy, budget, hidden_ND.device)
        buffers = [torch.empty(min(n, N), V, dtype=dtype, device=hidden_ND.device) for _ in range(1 + with_entropy)]
        with torch.autocast(hidden_ND.device.type, enabled=False):
            for first in range(0, N, n):
                rows = slice(first, min(first + n, N))
                x_nV, *spare = (b[: rows.stop - first] for b in buffers)
                hidden_nD = torch.where(keep_N[rows, None], hidden_ND[rows].to(dtype), 0.0)
                head.logits_(x_nV, hidden_nD, rows)
                logprobs_N[rows], entropy_n = row_stats_(x_nV, spare[0] if spare else None, ids_N[rows])
                if entropy_N is not None and entropy_n is not None:
                    entropy_N[rows] = entropy_n
        logprobs_N = masked_rows(logprobs_N, keep_N, outside_N)
        if entropy_N is not None:
            entropy_N = masked_rows(entropy_N, keep_N, outside_N)
        scale_N = scale if isinstance(scale, Tensor) else None
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, ids_N, keep_N, logprobs_N, entropy_N, scale_N)
        ctx.scale = None if scale_N is not None else scale
        ctx.softcap, ctx.budget = softcap, budget
        ctx.set_materialize_grads(False)
        return logprobs_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_N, grad_entropy_N):
        hidden_ND, weight_VD, bias_V, ids_N, keep_N, logprobs_N, entropy_N, scale_N = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        if grad_N is None and grad_entropy_N is None:
            return (None,) * 9
        scale = ctx.scale if scale_N is None else scale_N
        dtype = logprobs_N.dtype
        head = _Head(weight_VD, bias_V, ctx.softcap, scale, dtype)
        grad_N = torch.zeros_like(logprobs_N) if grad_N is None else grad_N
        logprobs_N, grad_N = (torch.where(keep_N, x, 0.0) for x in (logprobs_N, grad_N))
        if grad_entropy_N is not None:
            grad_entropy_N, entropy_N = (torch.where(keep_N, x, 0.0) for x in (grad_entropy_N, entropy_N))
        N, V, device = len(hidden_ND), len(weight_VD), hidden_ND.device
        count = 1 + (ctx.softcap is not None) + (grad_entropy_N is not None)
        n = _rows_per_chunk(N, V, dtype.itemsize, count, ctx.budget, device)
        buffers = [torch.empty(min(n, N), V, dtype=dtype, device=device) for _ in range(count)]
        dhidden_ND = torch.empty_like(hidden_ND) if need_hidden else None
        dweight_VD = torch.zeros(weight_VD.shape, dtype=dtype, device=device) if need_weight else None
        dbias_V = torch.zeros(V, dtype=dtype, device=device) if need_bias else None
        with torch.autocast(device.type, enabled=False):
            for first in range(0, N, n):
                rows = slice(first, min(first + n, N))
                x_nV, *more = (b[: rows.stop - first] for b in buffers)
                slope_nV = more.pop() if ctx.softcap is not None else None
                spare_nV = more.pop() if more else None
                hidden_nD = torch.where(keep_N[rows, None], hidden_ND[rows].to(dtype), 0.0)
                head.logits_(x_nV, hidden_nD, rows, slope_nV)
                factor_n = row_grad_(
                    x_nV,
                    spare_nV,
                    ids_N[rows],
                    logprobs_N[rows],
                    grad_N[rows],
                    None if entropy_N is None else entropy_N[rows],
                    None if grad_entropy_N is None else grad_entropy_N[rows],
                )
                if slope_nV is not None:
                    x_nV.mul_(slope_nV)
                # The factor of each row goes on the narrow side of both products: no pass over n x V for it.
                factor_n1 = factor_n[:, None] * head.scale_of(rows)
                if dhidden_ND is not None:
                    dhidden_ND[rows] = torch.mm(x_nV, head.weight_VD).mul_(factor_n1)
                if dweight_VD is not None:
                    dweight_VD.addmm_(x_nV.t(), hidden_nD * factor_n1)
                if dbias_V is not None:
                    dbias_V.addmv_(x_nV.t(), factor_n1.squeeze(1))
        dweight = None if dweight_VD is None else dweight_VD.to(weight_VD.dtype)
        dbias = None if dbias_V is None else dbias_V.to(bias_V.dtype)
        return dhidden_ND, dweight, dbias, None, None, None, None, None, None


def linear_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    temperature: float | Tensor = 1.0,
    ignore_index: int = -100,
    return_entropy: bool = False,
    logits_budget_bytes: int = 256 << 20,
    backend: str = "auto",
    debug: bool = False,
) -> Tensor | LogprobsAndEntropy:
    """`token_logprobs(softcap(hidden @ weight.T + bias), ids)` without ever holding the logits of all rows.

    hidden [..., D]; weight [V, D]; ids [...]; bias [V]. softcap(x) = softcap * tanh(x / softcap), before the
    temperature. All buffers of n x V that live at one time fit `logits_budget_bytes` (one row is the least).
    Differentiable in hidden, weight and bias; the backward recomputes the logits. Other arguments, ignored rows
    and ids outside the vocabulary as in `token_logprobs`; what `hidden` holds at ignored rows is never read into
    a result.
    """
    check_float("hidden", hidden)
    check_float("weight", weight)
    if weight.dim() != 2 or weight.numel() == 0:
        raise ValueError(f"weight must be [V, D] and not empty (is it sharded?), got {tuple(weight.shape)}")
    V, D = weight.shape
    if hidden.dim() == 0 or hidden.shape[-1] != D:
        raise ValueError(f"hidden has shape {tuple(hidden.shape)}, expected [..., {D}] to match weight")
    check_ids(ids, tuple(hidden.shape[:-1]), "hidden", V, ignore_index, debug)
    if bias is not None:
        check_float("bias", bias, (V,), "weight")
    if softcap is not None:
        check_number("softcap", softcap, 0, open_low=True)
    check_temperature(temperature, ids, ignore_index, debug)
    if isinstance(logits_budget_bytes, bool) or not isinstance(logits_budget_bytes, int) or logits_budget_bytes < 1:
        raise ValueError(f"logits_budget_bytes={logits_budget_bytes!r} must be a positive int")
    if debug:
        debug_finite("hidden", hidden, (ids != ignore_index)[..., None])
        debug_finite("weight", weight)
    resolve_backend(backend, hidden.device)
    logprobs_N, entropy_N = _LinearTokenLogprobs.apply(
        hidden.reshape(-1, D),
        weight,
        bias,
        ids.reshape(-1),
        temperature,
        softcap,
        ignore_index,
        return_entropy,
        logits_budget_bytes,
    )
    logprobs = logprobs_N.view(ids.shape)
    return LogprobsAndEntropy(logprobs, entropy_N.view(ids.shape)) if return_entropy else logprobs
