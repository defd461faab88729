"""fastrlhf: SFT -> reward model -> PPO, lean, exact and fast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "Config",
    "UserError",
    "load_reward_model",
    "run_evaluate",
    "run_pipeline",
    "run_ppo",
    "run_reward",
    "run_sft",
]

if TYPE_CHECKING:
    from fastrlhf.config import Config
    from fastrlhf.errors import UserError
    from fastrlhf.loading import load_reward_model
    from fastrlhf.pipeline import run_evaluate, run_pipeline, run_ppo, run_reward, run_sft

_HOME = {
    "Config": "fastrlhf.config",
    "UserError": "fastrlhf.errors",
    "load_reward_model": "fastrlhf.loading",
    "run_evaluate": "fastrlhf.pipeline",
    "run_pipeline": "fastrlhf.pipeline",
    "run_ppo": "fastrlhf.pipeline",
    "run_reward": "fastrlhf.pipeline",
    "run_sft": "fastrlhf.pipeline",
}


def __getattr__(name: str) -> Any:
    # Lazy: `fastrlhf --help` and a typo in a configuration must answer before torch is imported.
    if name in _HOME:
        import importlib

        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'fastrlhf' has no attribute {name!r}")
