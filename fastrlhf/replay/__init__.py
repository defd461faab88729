"""`fastrlhf replay`: run a recording again and compare every number with what it holds.

Recordings of PPO updates, SFT and reward-model training; the format is docs/recordings.md's.
"""

from __future__ import annotations

from fastrlhf.errors import UserError, brief
from fastrlhf.replay.ppo import replay_ppo
from fastrlhf.replay.recorded import Recording
from fastrlhf.replay.stages import replay_reward, replay_sft

__all__ = ["replay"]


def replay(basename: str) -> dict[str, float]:
    """The largest absolute difference for each quantity of the recording at `basename`."""
    recording = Recording(basename)
    run = {"ppo": replay_ppo, "sft": replay_sft, "reward": replay_reward}[recording.meta["kind"]]
    try:
        return run(recording).worst
    except UserError:
        raise
    except Exception as err:
        # Nothing but the recording decides what happens here, and it may hold anything.
        what = f"{type(err).__name__}: {brief(err)}"
        raise UserError(f"replay: {recording.base} is not a whole recording that fits its model ({what})") from err
