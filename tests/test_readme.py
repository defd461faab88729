"""What the README shows must work as it stands there."""

import json
import re
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
MODEL = "EleutherAI/pythia-160m"


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.fixture
def here(finished, rows, tmp_path, monkeypatch):
    """A folder with the files that the README names; the model is a tiny one of the same family."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(rows.sft, "sft.jsonl")
    shutil.copy(rows.preferences, "pairs.jsonl")
    shutil.copytree(finished / "sft/model", MODEL)
    return tmp_path


def test_the_python_of_the_readme(here, capsys):
    reward, api, scoring = blocks("python")
    space = {}
    exec(reward, space)
    assert space["brevity"](["a", "b"], ["", "x" * 200]) == [1.0, 0.0]
    exec(api.replace("response_length = 32", "response_length = 4"), {})
    path, score, kl = capsys.readouterr().out.splitlines()[-1].rsplit(" ", 2)
    assert (here / path / "model.safetensors").exists() and float(score) and float(kl)
    exec(scoring, {})
    (value,) = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert abs(value) < 100


def test_the_yaml_of_the_readme(here):
    from fastrlhf.config_parser import parse_config

    (here / "mine.yaml").write_text(blocks("yaml")[0])
    cfg = parse_config(["--config", "mine.yaml", "--ppo.kl_coef", "0.1"], command="run")
    assert (cfg.model.path, cfg.data.preferences, cfg.ppo.kl_coef) == (MODEL, "pairs.jsonl", 0.1)


def test_no_link_is_dead_and_no_placeholder_is_left():
    for text in (README, (ROOT / "CONTRIBUTING.md").read_text()):
        for target in re.findall(r"\]\((?!http)([^)]+)\)", text):
            assert (ROOT / target).exists(), target
        assert not re.search(r"@[A-Z]+@", text)
