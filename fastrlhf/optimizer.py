"""AdamW with the reference's betas, and with fp32 master weights where a model is stored in fewer bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["MasterAdamW", "adamw"]


def adamw(modules: nn.Module, *, lr: float, eps: float, weight_decay: float) -> torch.optim.AdamW:
    """One group over all parameters, in one fused pass per step."""
    params = [p for p in modules.parameters() if p.requires_grad]
    whole = all(p.dtype.itemsize >= 4 for p in params)
    kind = torch.optim.AdamW if whole else MasterAdamW
    return kind(params, lr=lr, betas=(0.9, 0.999), eps=eps, weight_decay=weight_decay, fused=True)


class MasterAdamW(torch.optim.AdamW):
    """AdamW on fp32 copies of half-precision parameters.

    A bfloat16 weight has 8 significant bits: a step below 1/512 of it, which is every step at the learning rates of
    RLHF, is rounded away. Here steps are taken by the copy, which is rounded into the model afterwards. Gradients
    are summed over micro-batches in fp32 too, each taken over (and freed) as soon as its backward pass has made it.
    Memory per parameter: 2 bytes of weight, 4 of copy, 4 of gradient and 8 of moments.

    `param_groups` holds the copies, so clipping and norms see fp32 gradients. `state_dict` holds them as `master`.
    """

    def __init__(self, params: list[nn.Parameter], **options: Any) -> None:
        self._rounded: list[tuple[nn.Parameter, nn.Parameter]] = []
        super().__init__([self._master(p) for p in params], **options)

    def _master(self, param: nn.Parameter) -> nn.Parameter:
        if param.dtype.itemsize >= 4:
            return param
        master = nn.Parameter(param.detach().float())

        def take_gradient(param: Tensor) -> None:
            if param.grad is None:
                return
            if master.grad is None:
                master.grad = param.grad.float()
            else:
                master.grad += param.grad
            param.grad = None

        param.register_post_accumulate_grad_hook(take_gradient)
        self._rounded.append((param, master))
        return master

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step of the copies, then rounded into the parameters."""
        loss = super().step(closure)
        torch._foreach_copy_([p for p, _ in self._rounded], [m for _, m in self._rounded])
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Adam's state, and each copy under `master`."""
        saved = super().state_dict()
        masters = {id(m): m.detach() for _, m in self._rounded}
        for i, master in enumerate(self.param_groups[0]["params"]):
            if id(master) in masters:
                saved["state"][i] = {**saved["state"].get(i, {}), "master": masters[id(master)]}
        return saved

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inverse; the parameters become the rounded copies."""
        state = {i: dict(slot) for i, slot in state_dict["state"].items()}
        masters = {i: slot.pop("master") for i, slot in state.items() if "master" in slot}
        super().load_state_dict({**state_dict, "state": {i: slot for i, slot in state.items() if slot}})
        for i, master in masters.items():
            self.param_groups[0]["params"][i].copy_(master)
        torch._foreach_copy_([p for p, _ in self._rounded], [m for _, m in self._rounded])
