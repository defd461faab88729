"""ppo_loss: the clipped policy loss and the clipped value loss, with their gradients and statistics in one go."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastrlhf_kernels._backend import (
    check_float,
    check_mask,
    check_number,
    compute_dtype,
    debug_finite,
    debug_true,
    resolve_backend,
)


class PPOStats(NamedTuple):
    """0-d tensors, detached; all but `ratio_max` are sums over the masks, so micro-batches and ranks add up.

    d = logprob - old_logprob, ratio = exp(d). The three KL sums estimate KL(old || new) from tokens of the old
    policy. The tensors live in the dtype of the arithmetic (fp32, fp64 for fp64 inputs), counts too.
    """

    n: Tensor  # policy slots
    n_value: Tensor  # value slots
    pg_loss_sum: Tensor  # before the normaliser
    vf_loss_sum: Tensor  # before the normaliser, the factor 1/2 included
    pg_clipped: Tensor  # slots where the clipped branch is the larger: max picks it strictly
    vf_clipped: Tensor
    ratio_sum: Tensor
    ratio_max: Tensor  # the largest ratio, 0 over an empty mask; combine with max
    kl_k1_sum: Tensor  # sum of -d
    kl_k2_sum: Tensor  # sum of d^2 / 2, the reference's approxkl
    kl_k3_sum: Tensor  # sum of exp(d) - 1 - d


class PPOLoss(NamedTuple):
    loss: Tensor
    pg_loss: Tensor
    vf_loss: Tensor
    stats: PPOStats


def _slope(unclipped: Tensor, clipped: Tensor, inside: Tensor) -> Tensor:
    """d max(unclipped, clipped) / d unclipped as torch's autograd has it: a tie outside the clip range counts half."""
    outside = 0.5 * ((unclipped >= clipped).to(unclipped.dtype) + (unclipped > clipped).to(unclipped.dtype))
    return torch.where(inside, 1.0, outside)


def _amax(x: Tensor) -> Tensor:
    return x.amax() if x.numel() else x.new_zeros(())


class _PPOLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        logprobs,
        values,
        entropy,
        old_logprobs,
        advantages,
        old_values,
        returns,
        mask,
        value_mask,
        normalizer,
        value_normalizer,
        clip,
        value_clip,
        vf_coef,
        entropy_coef,
    ):
        dtype = compute_dtype(logprobs, old_logprobs, advantages, values, old_values, returns, entropy)
        n, n_value = mask.sum().to(dtype), value_mask.sum().to(dtype)
        normalizer = n.clamp(min=1) if normalizer is None else normalizer
        value_normalizer = n_value.clamp(min=1) if value_normalizer is None else value_normalizer

        # Policy. Where the mask is False d and the advantage are replaced by 0, so nothing there can matter.
        d = torch.where(mask, logprobs.to(dtype) - old_logprobs.to(dtype), 0.0)
        minus_advantage = torch.where(mask, -advantages.to(dtype), 0.0)
        ratio = d.exp()
        unclipped = minus_advantage * ratio
        clipped = minus_advantage * ratio.clamp(1 - clip, 1 + clip)
        pg_loss_sum = torch.maximum(unclipped, clipped).sum()
        pg_loss = pg_loss_sum / normalizer

        # Value.
        v, v_old, target = (torch.where(value_mask, x.to(dtype), 0.0) for x in (values, old_values, returns))
        low, high = v_old - value_clip, v_old + value_clip
        error = v - target
        loss1, loss2 = error.square(), (v.clamp(low, high) - target).square()
        vf_loss_sum = 0.5 * torch.maximum(loss1, loss2).sum()
        vf_loss = vf_loss_sum / value_normalizer

        loss = pg_loss + vf_coef * vf_loss
        if entropy is not None:
            loss = loss - entropy_coef * (torch.where(mask, entropy.to(dtype), 0.0).sum() / normalizer)
        stats = (
            n,
            n_value,
            pg_loss_sum,
            vf_loss_sum,
            (clipped > unclipped).sum().to(dtype),
            (loss2 > loss1).sum().to(dtype),
            torch.where(mask, ratio, 0.0).sum(),
            _amax(torch.where(mask, ratio, 0.0)),
            -d.sum(),
            0.5 * d.square().sum(),
            (d.expm1() - d).sum(),
        )
        dlogprobs = dvalues = dentropy = None
        if ctx.needs_input_grad[0]:
            inside = (ratio >= 1 - clip) & (ratio <= 1 + clip)
            dlogprobs = unclipped * _slope(unclipped, clipped, inside) / normalizer
        if ctx.needs_input_grad[1]:
            inside = (v >= low) & (v <= high)
            dvalues = error * _slope(loss1, loss2, inside) / value_normalizer
        if ctx.needs_input_grad[2]:
            dentropy = torch.zeros_like(d).masked_fill_(mask, -entropy_coef / normalizer)
        ctx.save_for_backward(dlogprobs, dvalues, dentropy)
        ctx.vf_coef = vf_coef
        ctx.dtypes = tuple(x.dtype if x is not None else None for x in (logprobs, values, entropy))
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*stats)
        return loss, pg_loss, vf_loss, *stats

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss, grad_pg, grad_vf, *_):
        dlogprobs, dvalues, dentropy = ctx.saved_tensors
        if grad_loss is not None:
            grad_pg = grad_loss if grad_pg is None else grad_pg + grad_loss
            from_loss = ctx.vf_coef * grad_loss
            grad_vf = from_loss if grad_vf is None else grad_vf + from_loss
        pairs = ((dlogprobs, grad_pg), (dvalues, grad_vf), (dentropy, grad_loss))
        grads = [
            None if grad is None or upstream is None else (grad * upstream).to(dtype)
            for (grad, upstream), dtype in zip(pairs, ctx.dtypes, strict=True)
        ]
        return (*grads, *(None,) * 12)


def _check_normalizer(name: str, value: float | Tensor | None, debug: bool) -> None:
    if value is None:
        return
    if not isinstance(value, Tensor):
        check_number(name, value, 0, open_low=True)
        return
    if value.dim() != 0 or value.requires_grad:
        raise ValueError(f"{name} must be a number or a 0-d tensor without gradient, got shape {tuple(value.shape)}")
    if debug:
        debug_true(name, (value > 0)[None], "must be positive")


def ppo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    value_mask: Tensor,
    *,
    clip: float,
    value_clip: float,
    vf_coef: float,
    normalizer: float | Tensor | None = None,
    value_normalizer: float | Tensor | None = None,
    entropy: Tensor | None = None,
    entropy_coef: float = 0.0,
    backend: str = "auto",
    debug: bool = False,
) -> PPOLoss:
    """loss = pg_loss + vf_coef * vf_loss - entropy_coef * (sum of entropy over mask) / normalizer.

    pg_loss = sum over mask of max(-A ratio, -A clamp(ratio, 1 - clip, 1 + clip)) / normalizer
    vf_loss = sum over value_mask of max((v - R)^2, (clamp(v, v_old - value_clip, v_old + value_clip) - R)^2) / 2
              / value_normalizer

    logprobs, old_logprobs, advantages, mask (bool), entropy share one shape; values, old_values, returns,
    value_mask (bool) another. A normaliser is a number or a 0-d tensor, by default its mask's count, at least 1.
    `loss`, `pg_loss` and `vf_loss` are differentiable in logprobs, values and entropy, and in nothing else; `stats`
    is detached. What the inputs hold outside their mask changes nothing.
    """
    shape, value_shape = tuple(logprobs.shape), tuple(values.shape)
    check_float("logprobs", logprobs)
    check_float("old_logprobs", old_logprobs, shape, "logprobs")
    check_float("advantages", advantages, shape, "logprobs")
    check_mask("mask", mask, shape, "logprobs")
    check_float("values", values)
    check_float("old_values", old_values, value_shape, "values")
    check_float("returns", returns, value_shape, "values")
    check_mask("value_mask", value_mask, value_shape, "values")
    check_number("clip", clip, 0)
    check_number("value_clip", value_clip, 0)
    check_number("vf_coef", vf_coef)
    check_number("entropy_coef", entropy_coef)
    if entropy is not None:
        check_float("entropy", entropy, shape, "logprobs")
    elif entropy_coef != 0:
        raise ValueError(f"entropy_coef={entropy_coef} needs entropy")
    _check_normalizer("normalizer", normalizer, debug)
    _check_normalizer("value_normalizer", value_normalizer, debug)
    if debug:
        for name, tensor in (("logprobs", logprobs), ("old_logprobs", old_logprobs), ("advantages", advantages)):
            debug_finite(name, tensor, mask)
        for name, tensor in (("values", values), ("old_values", old_values), ("returns", returns)):
            debug_finite(name, tensor, value_mask)
        if entropy is not None:
            debug_finite("entropy", entropy, mask)
    resolve_backend(backend, logprobs.device)
    loss, pg_loss, vf_loss, *stats = _PPOLoss.apply(
        logprobs,
        values,
        entropy,
        old_logprobs,
        advantages,
        old_values,
        returns,
        mask,
        value_mask,
        normalizer,
        value_normalizer,
        clip,
        value_clip,
        vf_coef,
        entropy_coef,
    )
    return PPOLoss(loss, pg_loss, vf_loss, PPOStats(*stats))
