"""metrics.jsonl, samples.jsonl, TensorBoard and the lines on the terminal."""

import json

import pytest
import torch

from fastrlhf.config import LogConfig
from fastrlhf.errors import UserError
from fastrlhf.metrics import Metrics
from fastrlhf.run_folder import RunFolder


@pytest.fixture
def run(tmp_path):
    (tmp_path / "config.yaml").write_text("seed: 7\n")
    return RunFolder(tmp_path, tmp_path)


def metrics(run, stage="ppo", resume_step=0, **log):
    settings = LogConfig(**({"tensorboard": False, "progress": "plain"} | log))
    return Metrics(run, settings, stage=stage, total_steps=5, resume_step=resume_step)


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def steps(run):
    return [(row["stage"], row["step"]) for row in lines(run.root / "metrics.jsonl")]


def test_numbers_and_tensors_land_in_their_order(run):
    with metrics(run) as m:
        out = m.log(1, {"b": torch.tensor(0.1), "a": 2, "c": torch.tensor(3, dtype=torch.int64)})
    row = lines(run.root / "metrics.jsonl")[0]
    assert list(row) == ["stage", "step", "time", "b", "a", "c"]
    assert out == {"b": float(torch.tensor(0.1)), "a": 2.0, "c": 3.0} == {k: row[k] for k in out}


def test_a_resumed_stage_drops_what_is_past_its_checkpoint_and_nothing_else(run):
    with metrics(run, "sft") as m:
        for step in (1, 2, 3):
            m.log(step, {"x": step})
    with metrics(run, "ppo") as m:
        for step in (1, 2, 3):
            m.log(step, {"x": step})
            m.samples(step, [{"response": "a"}, {"response": "b"}])
    with (run.root / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "ppo", "st')  # torn by a kill
    with metrics(run, "ppo", resume_step=2) as m:
        m.log(3, {"x": 30})
    assert steps(run) == [("sft", 1), ("sft", 2), ("sft", 3), ("ppo", 1), ("ppo", 2), ("ppo", 3)]
    assert lines(run.root / "metrics.jsonl")[-1]["x"] == 30
    assert [row["step"] for row in lines(run.root / "samples.jsonl")] == [1, 1, 2, 2]


def test_line_separators_inside_a_sample_survive_a_resumption(run):
    text = "a\u2028b\u2029c\x85d\x0ce\r\nf\x1cg"
    with metrics(run) as m:
        m.samples(1, [{"response": text}])
    with metrics(run, resume_step=1):
        pass
    assert [row["response"] for row in lines(run.root / "samples.jsonl")] == [text]


def test_a_line_torn_inside_a_character_is_dropped(run):
    with metrics(run) as m:
        m.samples(1, [{"response": "é"}])
    with (run.root / "samples.jsonl").open("ab") as file:
        file.write('{"stage": "ppo", "step": 2, "response": "é'.encode()[:-1])
    with metrics(run, resume_step=1):
        pass
    assert len(lines(run.root / "samples.jsonl")) == 1


def test_tensorboard_shows_each_step_once_after_a_resumption(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with metrics(run, tensorboard=True) as m:
        for step in (1, 2, 3):
            m.log(step, {"x": step})
    with metrics(run, tensorboard=True, resume_step=1) as m:
        for step in (2, 3):
            m.log(step, {"x": 10 * step})
    events = EventAccumulator(str(run.root / "tensorboard" / "ppo"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("x")] == [(1, 1.0), (2, 20.0), (3, 30.0)]


def test_plain_lines_show_the_first_and_the_last_step(run, capsys):
    with metrics(run) as m:
        for step in range(1, 6):
            m.log(step, {"objective/scores": 0.5, "objective/kl": 1.25})
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "ppo 1/5  reward 0.5  KL 1.25" and out[-1] == "ppo 5/5  reward 0.5  KL 1.25"


def test_rich_progress_ends_cleanly_after_an_error(run, capsys):
    with pytest.raises(RuntimeError), metrics(run, progress="rich") as m:
        m.log(1, {"objective/scores": 0.5})
        raise RuntimeError
    assert "ppo" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_missing_logger_is_a_sentence(run, monkeypatch, name):
    import sys

    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=rf"log\.{name} needs"):
        metrics(run, **{name: True})


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_loggers_get_every_step_and_are_closed(run, tmp_path, monkeypatch, name):
    import sys
    from types import SimpleNamespace

    seen, begun = [], []
    fake = SimpleNamespace(log=lambda values, step: seen.append((step, values)), finish=lambda: seen.append("closed"))
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(init=lambda **kwargs: begun.append(kwargs) or fake))
    with metrics(run, **{name: True}) as m:
        m.log(1, {"x": torch.tensor(1.0)})
    assert seen == [(1, {"x": 1.0}), "closed"]
    assert begun[0]["config"] == {"seed": 7} and begun[0]["resume"] == "allow"

    # A resumed stage goes on in the logger's run; a new run whose folder has the same name does not.
    other = tmp_path / "elsewhere" / run.root.name
    other.mkdir(parents=True)
    (other / "config.yaml").write_text("seed: 7\n")
    for folder in (run, RunFolder(other, other)):
        with metrics(folder, **{name: True}):
            pass
    key = {"wandb": "id", "trackio": "name"}[name]
    assert begun[0][key] == begun[1][key] != begun[2][key]


def test_wandb_itself_writes_every_name_without_an_account(run, monkeypatch):
    pytest.importorskip("wandb", reason="the extra [wandb] is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for stage, step in (("sft", 1), ("ppo", 1), ("ppo", 2)):
        with metrics(run, stage, resume_step=step - 1, wandb=True) as m:
            m.log(step, {"objective/kl": 1.5})
    files = sorted((run.root / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 3 and all(b"objective/kl" in file.read_bytes() for file in files)
    assert files[0].name != files[1].name == files[2].name  # stage by stage, resumption under one id


def test_wandb_without_an_account_is_a_sentence(run, monkeypatch, tmp_path):
    wandb = pytest.importorskip("wandb", reason="the extra [wandb] is not installed")
    wandb.teardown()  # the session of an earlier test would keep its mode
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match="log.wandb: No API key configured.*WANDB_MODE=offline"):
        metrics(run, wandb=True)


def test_trackio_itself_stores_every_step(run, monkeypatch, tmp_path):
    import sqlite3
    import subprocess
    import sys

    pytest.importorskip("trackio", reason="the extra [trackio] is not installed")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when trackio is imported: a process of its own
    code = """
import sys
from pathlib import Path
from fastrlhf.config import LogConfig
from fastrlhf.metrics import Metrics
from fastrlhf.run_folder import RunFolder
run = RunFolder(Path(sys.argv[1]), Path(sys.argv[1]))
for step in (1, 2):
    log = LogConfig(tensorboard=False, trackio=True)
    with Metrics(run, log, stage="ppo", total_steps=2, resume_step=step - 1) as m:
        m.log(step, {"objective/kl": 1.5})
"""
    subprocess.run([sys.executable, "-c", code, str(run.root)], check=True)
    rows = sqlite3.connect(tmp_path / "trackio" / "fastrlhf.db").execute(
        "select step, run_name, json_extract(cast(metrics as text), '$.\"objective/kl\"') from metrics order by step"
    )
    stored = list(rows)
    assert [(step, kl) for step, _, kl in stored] == [(1, 1.5), (2, 1.5)]
    assert stored[0][1] == stored[1][1]
