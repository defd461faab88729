"""Run folders: made once, locked while written, compared on resumption."""

import errno

import pytest

from fastrlhf.config_parser import config_to_yaml
from fastrlhf.errors import UserError
from fastrlhf.run_folder import RunFolder, atomic_write_text, disk_errors


def open_run(cfg, command="run"):
    return RunFolder.open(cfg, command, config_yaml=config_to_yaml(cfg))


def test_a_new_folder_holds_the_configuration(tiny_config, tmp_path):
    cfg = tiny_config(tmp_path / "a" / "b")
    with open_run(cfg) as run:
        head, text = (run.root / "config.yaml").read_text().split("\n", 1)
        assert head == "# fastrlhf run" and text == config_to_yaml(cfg)
        stage = run.stage("sft")
        assert (stage.root, stage.path, stage.path.is_dir()) == (run.root, run.root / "sft", True)
        assert stage.checkpoints == run.root / "checkpoints" / "sft"


def test_folders_without_a_name_never_collide(tiny_config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = [open_run(tiny_config(None), "sft") for _ in range(3)]
    assert len({run.root for run in runs}) == 3
    assert all(run.root.parent.name == "runs" and run.root.name.startswith("sft-") for run in runs)
    for run in runs:
        run.__exit__(None, None, None)


def test_an_empty_folder_may_be_given_and_a_full_one_may_not(tiny_config, tmp_path):
    (tmp_path / "empty").mkdir()
    with open_run(tiny_config(tmp_path / "empty")):
        pass
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="is not empty"):
        open_run(tiny_config(tmp_path / "full"))
    assert (tmp_path / "full" / "thesis.tex").read_text() == "years of work"


def test_a_kill_before_config_yaml_leaves_no_dead_end(tiny_config, tmp_path):
    root = tmp_path / "run"
    root.mkdir()
    (root / ".lock").touch()
    (root / ".tmp-config.yaml").write_text("see")
    with open_run(tiny_config(root)):
        pass


def test_two_that_start_at_once_do_not_share_a_folder(tiny_config, tmp_path, monkeypatch):
    from fastrlhf import run_folder

    cfg, lock = tiny_config(tmp_path / "run"), run_folder._lock

    def slower(root):
        monkeypatch.setattr(run_folder, "_lock", lock)
        with open_run(cfg) as run:  # the other one, from start to end
            (run.root / "metrics.jsonl").write_text("theirs")
        return lock(root)

    monkeypatch.setattr(run_folder, "_lock", slower)
    with pytest.raises(UserError, match="another run has just started"):
        open_run(cfg)
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == "theirs"


def test_the_lock_goes_with_the_run(tiny_config, tmp_path):
    cfg = tiny_config(tmp_path / "run")
    with open_run(cfg):
        cfg.resume = True
        with pytest.raises(UserError, match="another process is writing"):
            open_run(cfg)
    with open_run(cfg):
        pass


@pytest.mark.parametrize("error", [UserError("x"), RuntimeError("x"), KeyboardInterrupt()])
def test_a_run_that_fails_before_its_first_step_leaves_no_folder(tiny_config, tmp_path, error):
    cfg = tiny_config(tmp_path / "run")
    with pytest.raises(type(error)), open_run(cfg) as run:
        run.stage("sft")
        raise error
    assert not (tmp_path / "run").exists()
    with pytest.raises(type(error)), open_run(cfg) as run:
        (run.root / "metrics.jsonl").write_text("a step\n")
        raise error
    assert (tmp_path / "run" / "config.yaml").is_file()
    cfg.resume = True
    (tmp_path / "run" / "metrics.jsonl").unlink()
    with pytest.raises(type(error)), open_run(cfg):
        raise error
    assert (tmp_path / "run" / "config.yaml").is_file()  # a resumed run is never removed


@pytest.mark.parametrize(
    "field, value", [("ppo.kl_coef", 0.5), ("seed", 2), ("data.sft", "other.jsonl"), ("model.from_scratch", None)]
)
def test_a_resumed_run_may_not_change(tiny_config, tmp_path, field, value):
    with open_run(tiny_config(tmp_path / "run")):
        pass
    changed = {} if field == "seed" else {field: value}
    cfg = tiny_config(tmp_path / "run", **changed)
    cfg.resume, cfg.seed = True, value if field == "seed" else cfg.seed
    with pytest.raises(UserError, match=rf"resume: .*\({field}"):
        open_run(cfg)


def test_a_resumed_run_may_log_and_save_otherwise(tiny_config, tmp_path):
    with open_run(tiny_config(tmp_path / "run")):
        pass
    before = (tmp_path / "run" / "config.yaml").read_text()
    cfg = tiny_config(tmp_path / "run", **{"log.samples": 9, "checkpoint.every": 7})
    cfg.resume = True
    with open_run(cfg):
        pass
    assert (tmp_path / "run" / "config.yaml").read_text() == before


@pytest.mark.parametrize("text", ["a: [", "\x00\x01", "- list", ""])
def test_a_damaged_configuration_is_a_sentence(tiny_config, tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    cfg = tiny_config(tmp_path)
    cfg.resume = True
    with pytest.raises(UserError, match="resume"):
        open_run(cfg)


def test_atomic_write_is_whole_or_nothing(tmp_path, monkeypatch):
    import os

    path = tmp_path / "f.json"
    atomic_write_text(path, "old")

    def fails(src, dst):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(UserError, match="no disk space"):
        atomic_write_text(path, "new")
    assert path.read_text() == "old"


def test_disk_errors_say_what_and_leave_the_rest_alone():
    for error, words in (
        (OSError(errno.ENOSPC, ""), "no disk space left while writing x"),
        (OSError(errno.EROFS, ""), "cannot read or write x: Read-only file system"),
        (Exception("No space left on device (os error 28)"), "no disk space"),
    ):
        with pytest.raises(UserError, match=words), disk_errors("x"):
            raise error
    for other in (OSError(errno.EIO, "bad sector"), ValueError("os error"), UserError("mine")):
        with pytest.raises(type(other)) as caught, disk_errors("x"):
            raise other
        assert caught.value is other
