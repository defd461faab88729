"""`--resume` after SIGKILL and SIGTERM: the same weights to the byte, and no step twice."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
KILL, TERM, INT = int(signal.SIGKILL), int(signal.SIGTERM), int(signal.SIGINT)


def at(where, stage=None, step=None, target=None, number=KILL):
    return {"where": where, "signal_number": number, "stage": stage, "step": step, "target": target}


# Where the run is killed. Several in one row: killed again after each resumption.
CASES = {
    "sft, between metrics and checkpoint": [at("log", "sft", 2)],
    "sft, before the first checkpoint": [at("log", "sft", 1)],
    "sft, in the middle of a metrics line": [at("torn", "sft", 3)],
    "sft, model saved but not marked done": [at("before", target="sft/done.json")],
    "reward, between metrics and checkpoint": [at("log", "reward", 3)],
    "reward, checkpoint written but not renamed": [at("before", target="checkpoints/reward/step_00000002")],
    "reward, model written but not renamed": [at("before", target="reward/model")],
    "ppo, between metrics and checkpoint": [at("log", "ppo", 2)],
    "ppo, checkpoint renamed, older ones not pruned": [at("after", target="checkpoints/ppo/step_00000002")],
    "ppo, model saved but not marked done": [at("before", target="ppo/done.json")],
    "at the end, before the summary": [at("before", target="run/summary.json")],
    "once in each stage": [at("log", "sft", 4), at("log", "reward", 1), at("torn", "ppo", 3)],
    "SIGTERM in each stage": [at("log", s, n, number=TERM) for s, n in (("sft", 2), ("reward", 2), ("ppo", 1))],
    "sft, tokenizer written but not renamed": [at("before", target="sft/tokenizer")],
    "SIGTERM outside the loops": [
        at("before", target="sft/model", number=TERM),
        at("before", target="reward/done.json", number=TERM),
        at("before", target="run/summary.json", number=TERM),
    ],
    "SIGINT in a loop and outside": [at("log", "sft", 3, number=INT), at("before", target="ppo/model", number=INT)],
    "SIGTERM at the last step": [at("log", "reward", 4, number=TERM), at("log", "ppo", 3, number=TERM)],
}


@pytest.fixture(scope="module")
def outcomes(cli, tiny_config, tmp_path_factory):
    """Every case at once: all first runs, all second ones, ... two processes at a time."""
    folders = {name: tmp_path_factory.mktemp("killed") / "run" for name in CASES}
    exits = {name: [] for name in CASES}
    for attempt in range(1 + max(map(len, CASES.values()))):
        names = [name for name, kills in CASES.items() if attempt <= len(kills)]
        jobs = []
        for name in names:
            kill = CASES[name][attempt : attempt + 1]
            extra = {"kill": kill[0]} if kill else {}
            jobs.append(cli.job("run", tiny_config(folders[name]), *(["--resume"] if attempt else []), **extra))
        for name, done in zip(names, cli.many(jobs), strict=True):
            exits[name].append(done)
    return {name: (folders[name], exits[name]) for name in CASES}


def same_files(a, b, *names):
    for name in names:
        assert (a / name).read_bytes() == (b / name).read_bytes(), name


def same_run(a, b):
    for folder in ("sft/model", "reward/model", "ppo/critic", "ppo/model"):
        same_files(a, b, f"{folder}/model.safetensors", f"{folder}/tokenizer.json")
        configs = [json.loads((run / folder / "config.json").read_text()) for run in (a, b)]
        for config in configs:
            config.get("base_config", {}).pop("_name_or_path", None)  # the run's own folder
        assert configs[0] == configs[1]


def no_times(row):
    return {k: v for k, v in row.items() if not k.startswith("time") and k not in ("tokens_per_second", "ppo/eps")}


def lines(path):
    return [no_times(json.loads(line)) for line in path.read_text(encoding="utf-8").split("\n") if line]


def summary(folder):
    got = json.loads((folder / "summary.json").read_text())
    return {k: no_times(v) if isinstance(v, dict) else v for k, v in got.items() if k not in ("run", "seconds")}


@pytest.mark.parametrize("name", CASES)
def test_a_stopped_run_ends_as_if_nothing_had_happened(outcomes, finished, name):
    folder, exits = outcomes[name]
    for kill, done in zip(CASES[name], exits, strict=False):
        assert done.rc == (-KILL if kill["signal_number"] == KILL else 130), done.err
        if done.rc == 130:
            assert "--resume" in done.sentence()
    assert exits[-1].rc == 0, exits[-1].err
    same_run(folder, finished)
    assert lines(folder / "metrics.jsonl") == lines(finished / "metrics.jsonl")
    assert lines(folder / "samples.jsonl") == lines(finished / "samples.jsonl")
    assert lines(folder / "evaluation.jsonl") == lines(finished / "evaluation.jsonl")
    assert summary(folder) == summary(finished)


def test_the_module_killed_from_outside(cli, tiny_config, tmp_path, finished):
    folder = tmp_path / "run"
    job = cli.job("run", tiny_config(folder))
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "fastrlhf.cli", *job["argv"]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
        for line in process.stdout:
            if line.startswith("ppo 1/"):
                process.kill()
                break
        process.communicate(timeout=60)
    assert process.returncode == -KILL
    done = cli("run", tiny_config(folder), "--resume")
    assert done.rc == 0, done.err
    same_run(folder, finished)


@pytest.mark.parametrize("stage", ["sft", "reward", "ppo"])
def test_other_data_of_the_same_length_is_refused(cli, tiny_config, tmp_path, stage, rows, finished):
    for name in ("sft", "preferences"):
        (tmp_path / f"{name}.jsonl").write_bytes(getattr(rows, name).read_bytes())
    folder = tmp_path / "run"
    given = {"data.sft": str(tmp_path / "sft.jsonl"), "data.preferences": str(tmp_path / "preferences.jsonl")}
    if stage != "sft":
        given |= {"model.path": str(finished / "sft" / "model"), "model.from_scratch": None}
        given |= {"model.train_tokenizer": None, "ppo.reward_model": str(finished / "reward" / "model")}
    cfg = tiny_config(folder, **given)
    assert cli(stage, cfg, kill=at("log", stage, 2)).rc == -KILL
    before = (folder / "metrics.jsonl").read_bytes()
    changed = tmp_path / ("preferences.jsonl" if stage == "reward" else "sft.jsonl")
    changed.write_text(changed.read_text().replace("black", "pink!"))
    done = cli(stage, cfg, "--resume")
    assert done.rc == 2 and "restore the data" in done.sentence()
    assert (folder / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("name, text", [("sft/done.json", "{"), ("sft/done.json", "[1]"), ("sft/done.json", "\x00")])
def test_a_damaged_mark_is_a_sentence(cli, tiny_config, tmp_path, name, text):
    cfg = tiny_config(tmp_path / "run")
    assert cli("sft", cfg).rc == 0
    (tmp_path / "run" / name).write_text(text)
    done = cli("sft", cfg, "--resume")
    assert done.rc == 2 and "done.json is damaged" in done.sentence()


def test_odd_lines_in_metrics_are_dropped(cli, tiny_config, tmp_path):
    cfg = tiny_config(tmp_path / "run")
    assert cli("sft", cfg, kill=at("log", "sft", 2)).rc == -KILL
    path = tmp_path / "run" / "metrics.jsonl"
    path.write_text(path.read_text() + '7\n[]\nnull\n{"stage": "sft"}\n{"stage": "sft", "step": "x"}\n\x00\n')
    done = cli("sft", cfg, "--resume")
    assert done.rc == 0, done.err
    assert [row["step"] for row in lines(path)] == list(range(1, len(lines(path)) + 1))


def test_a_finished_run_resumed_does_nothing_twice(cli, tiny_config, tmp_path):
    cfg = tiny_config(tmp_path / "run")
    assert cli("sft", cfg).rc == 0
    weights = tmp_path / "run" / "sft" / "model" / "model.safetensors"
    before = (weights.stat().st_mtime_ns, (tmp_path / "run" / "metrics.jsonl").read_bytes())
    done = cli("sft", cfg, "--resume")
    assert done.rc == 0 and "sft: already done" in done.out
    assert (weights.stat().st_mtime_ns, (tmp_path / "run" / "metrics.jsonl").read_bytes()) == before
