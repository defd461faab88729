"""Sampling responses: the decode loop, and transformers' `generate` as its oracle."""

from fastrlhf.rollout.generate import Generation, check_generate, generate

__all__ = ["Generation", "check_generate", "generate"]
