"""`fastrlhf demo`: small and whole in the default run, in full on three seeds in the slow one."""

import json

import pytest

from fastrlhf import demo
from fastrlhf.cli import main


def summary_of(folder):
    return json.loads((folder / "summary.json").read_text())


def test_a_small_demo_promises_what_the_large_one_does(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "POSTS", 80)
    monkeypatch.setattr(demo, "HELDOUT", 12)
    small = {
        "model.from_scratch.hidden_size": 16,
        "model.from_scratch.intermediate_size": 32,
        "model.from_scratch.num_hidden_layers": 1,
        "sft.epochs": 1,
        "batch.episodes": 16,
        "batch.prompts_per_update": 8,
        "rollout.response_length": 8,
        "log.tensorboard": "false",
    }
    flags = [part for name, value in small.items() for part in (f"--{name}", str(value))]
    folder = tmp_path / "run"
    assert main(["demo", "--seed", "5", "--output_dir", str(folder), *flags]) == 0
    got = summary_of(folder)
    for section, names in {
        "sft": ["rougeL"],
        "rm": ["accuracy"],
        "ppo": ["gold_win_rate_vs_sft", "gold_score_sft", "gold_score_ppo", "kl", "distinct_2"],
        "seconds": ["sft", "reward", "ppo", "evaluate"],
    }.items():
        for name in names:
            assert isinstance(got[section][name], float), (section, name)
    assert len(got["samples"]) == 3 and all({"prompt", "sft", "ppo"} <= row.keys() for row in got["samples"])
    out = capsys.readouterr().out
    assert got["seed"] == 5 and "summary of" in out
    assert "sft.warmup_steps is 20, but there are only" in out and "will not reach its peak" in out
    train = {json.loads(line)["post"] for line in (folder / "corpus/sft_train.jsonl").open()}
    heldout = {json.loads(line)["prompt"] for line in (folder / "evaluation.jsonl").open()}
    assert len(heldout) == 12 and not any(post in prompt for post in train for prompt in heldout)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_demo_learns(tmp_path, seed):
    assert main(["demo", "--seed", str(seed), "--output_dir", str(tmp_path / "run")]) == 0
    got = summary_of(tmp_path / "run")
    assert got["rows"] >= 300
    assert got["rm"]["accuracy"] >= 0.80
    assert got["ppo"]["gold_win_rate_vs_sft"] >= 0.70
    assert got["ppo"]["gold_score_ppo"] > got["ppo"]["gold_score_sft"]
    assert 0 < got["ppo"]["kl"] <= 15
    assert got["ppo"]["distinct_2"] >= got["sft"]["distinct_2"] / 2
