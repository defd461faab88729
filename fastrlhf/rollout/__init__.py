"""Sampling responses: the decode loop, and transformers' `generate` as its oracle."""

from fastrlhf.rollout.generate import Generation, generate

__all__ = ["Generation", "generate"]
