"""A tiny data set, a configuration that runs in seconds, and the command line in processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

# Sums come out differently in their last bits with another number of threads, and some tests compare bits between
# processes. Set before torch is imported; the processes that tests start inherit it.
os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Rows:
    """The tiny data set."""

    sft: Path
    preferences: Path


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    colours, animals = (
        ["red", "blue", "green", "black", "white"],
        ["cat", "dog", "horse", "bird", "fish", "cow", "fox", "owl"],
    )
    prompts = [
        f"The {c} {a} went to the {animals[(i + j) % 8]} and"
        for i, c in enumerate(colours)
        for j, a in enumerate(animals)
    ]
    sft = [{"prompt": p, "completion": " slept." if i % 2 else " ate well."} for i, p in enumerate(prompts)]
    pairs = [{"prompt": p, "chosen": " slept.", "rejected": " ate ate ate"} for p in prompts]
    return Rows(write_jsonl(folder / "sft.jsonl", sft), write_jsonl(folder / "pairs.jsonl", pairs))


@pytest.fixture(scope="session")
def tiny_config(rows):
    """`tiny_config(folder, **{"ppo.kl_coef": 0.1})` -> a `Config` whose whole pipeline takes seconds."""
    from fastrlhf.config import Config

    def make(folder, **overrides):
        cfg = Config(output_dir=None if folder is None else str(folder))
        values = {
            "model.device": "cpu",
            "model.train_tokenizer": 300,
            "model.from_scratch": {
                "model_type": "gpt_neox",
                "hidden_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "intermediate_size": 32,
                "max_position_embeddings": 128,
            },
            "data.sft": str(rows.sft),
            "data.preferences": str(rows.preferences),
            "data.eval_fraction": 0.2,
            "sft.lr": 1e-2,
            "sft.batch_size": 8,
            "reward.lr": 1e-2,
            "reward.batch_size": 8,
            "ppo.lr": 1e-3,
            "ppo.epochs": 2,
            "ppo.missing_eos_score": None,
            "rollout.temperature": 1.0,
            "rollout.response_length": 6,
            "batch.episodes": 24,
            "batch.prompts_per_update": 8,
            "batch.minibatches": 2,
            "evaluate.rows": 8,
            "checkpoint.every": 1,
            "log.progress": "plain",
        }
        for name, value in (values | overrides).items():
            section, _, field = name.rpartition(".")
            target = getattr(cfg, section) if section else cfg
            assert hasattr(target, field), name
            setattr(target, field, value)
        return cfg

    return make


@dataclass(frozen=True)
class Done:
    """How a command ended; `rc` is negative for a signal."""

    rc: int
    out: str
    err: str

    def sentence(self):
        """All that stands on stderr, which must be one line."""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        return lines[0]


class CommandLine:
    """Commands in forks of one warm process, two at a time: each a real process, without 5 s of imports each."""

    def __init__(self, folder):
        env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
        script = str(ROOT / "tests" / "forks.py")
        self.folder, self.n = folder, 0
        self.server = subprocess.Popen(
            [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, cwd=folder
        )

    def job(self, command, cfg, *flags, **extra):
        """One command to run; see forks.py for `extra`."""
        from fastrlhf.config_parser import config_to_yaml

        self.n += 1
        base = self.folder / f"job{self.n}"
        config = base.with_suffix(".yaml")
        config.write_text(config_to_yaml(cfg), encoding="utf-8")
        return {"argv": [command, "--config", str(config), *flags], "base": str(base), **extra}

    def many(self, jobs):
        self.server.stdin.write(json.dumps(jobs) + "\n")
        self.server.stdin.flush()
        codes = json.loads(self.server.stdout.readline())
        texts = [[Path(f"{job['base']}.{end}").read_text() for end in ("out", "err")] for job in jobs]
        return [Done(rc, *text) for rc, text in zip(codes, texts, strict=True)]

    def __call__(self, *args, **kwargs):
        return self.many([self.job(*args, **kwargs)])[0]


@pytest.fixture(scope="session")
def cli(tmp_path_factory):
    line = CommandLine(tmp_path_factory.mktemp("cli"))
    yield line
    line.server.stdin.close()
    line.server.wait(timeout=60)


@pytest.fixture(scope="session")
def finished(cli, tiny_config, tmp_path_factory):
    """A whole run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    done = cli("run", tiny_config(folder))
    assert done.rc == 0, done.err
    return folder
