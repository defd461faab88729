"""YAML and dotted overrides: what is taken, what is refused, and in which words."""

import dataclasses
import re

import pytest

from fastrlhf.config import BatchSizes, Config, check_values
from fastrlhf.config_parser import FIELDS, config_from_dict, config_to_yaml, parse_config
from fastrlhf.errors import UserError


def parse(*argv, **kwargs):
    return parse_config(argv, command="ppo", **kwargs)


def test_overrides_beat_yaml_and_yaml_beats_defaults(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("seed: 3\nppo:\n  kl_coef: 1e-1\n  gamma: 0.9\n")
    cfg = parse("--config", str(file), "--ppo.gamma", "0.5")
    assert (cfg.seed, cfg.ppo.kl_coef, cfg.ppo.gamma, cfg.ppo.lam) == (3, 0.1, 0.5, 0.95)


def test_the_saved_configuration_reads_back_equal(tmp_path):
    cfg = parse("--model.from_scratch", "{model_type: gpt_neox, hidden_size: 12}", "--ppo.missing_eos_score", "null")
    file = tmp_path / "c.yaml"
    file.write_text(config_to_yaml(cfg))
    assert parse("--config", str(file)) == cfg
    assert cfg.ppo.missing_eos_score is None


def test_resume_alone_means_true():
    assert parse("--resume").resume is True
    assert parse("--resume", "--seed", "2").seed == 2
    assert parse().resume is False


def test_a_run_folder_is_all_that_resume_needs(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    began = parse("--ppo.gamma", "0.5", "--output_dir", str(run), "--model.from_scratch", "{model_type: gpt_neox}")
    (run / "config.yaml").write_text("# fastrlhf ppo\n" + config_to_yaml(began))
    resumed = parse("--resume", f"--output_dir={run}", "--log.samples", "1")
    began.resume, began.log.samples = True, 1
    assert resumed == began
    # A configuration that is given stands as it is.
    other = tmp_path / "c.yaml"
    other.write_text("seed: 3\n")
    assert parse("--config", str(other), "--resume", "--output_dir", str(run)).ppo.gamma == 1.0
    for text in ("", "# only this\n"):
        (run / "config.yaml").write_text(text)
        with pytest.raises(UserError, match="config.yaml is empty; it was changed or damaged"):
            parse("--resume", "--output_dir", str(run))
    with pytest.raises(UserError, match="nowhere is not a run folder"):
        parse("--resume", "--output_dir", str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--ppo.kl_coeff", "1"], ["ppo.kl_coeff", "did you mean ppo.kl_coef?"]),
        (["--kl_coef", "1"], ["kl_coef", "did you mean ppo.kl_coef?"]),
        (["--batch.episode", "1"], ["did you mean batch.episodes?"]),
        (["--ppo.kl_coef", "abc"], ["ppo.kl_coef", "abc"]),
        (["--ppo.whiten_scope", "node"], ["ppo.whiten_scope", "node", "rank"]),
        (["--seed", "1.5"], ["seed", "1.5"]),
        (["--ppo.kl_coef"], ["ppo.kl_coef"]),
        (["stray"], ["stray"]),
        (["--config", "nowhere.yaml"], ["nowhere.yaml", "does not exist"]),
    ],
)
def test_a_bad_flag_is_one_sentence_naming_the_field(argv, words):
    with pytest.raises(UserError) as caught:
        parse(*argv)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    "text, words",
    [
        ("ppo:\n  kl_coeff: 1\n", ["c.yaml", "ppo.kl_coeff", "did you mean ppo.kl_coef?"]),
        ("pppo:\n  kl_coef: 1\n", ["c.yaml", "pppo"]),
        ("ppo: 3\n", ["c.yaml", "ppo"]),
        ("- a\n", ["c.yaml", "mapping"]),
        ("ppo: [\n", ["c.yaml", "line"]),
        ("ppo:\n  epochs: many\n", ["ppo.epochs", "many"]),
    ],
)
def test_bad_yaml_is_one_sentence_naming_the_file(tmp_path, text, words):
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        parse("--config", str(file))
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_an_empty_yaml_is_all_defaults(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("# nothing\n")
    assert parse("--config", str(file)) == Config()


def test_a_mapping_is_checked_like_a_file():
    assert config_from_dict({"ppo": {"kl_coef": 1}}).ppo.kl_coef == 1.0
    with pytest.raises(UserError, match="there is no field 'ppo.kl'"):
        config_from_dict({"ppo": {"kl": 1}})


def test_help_shows_every_field_with_meaning(capsys):
    with pytest.raises(SystemExit) as caught:
        parse("--help")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for name in FIELDS:
        assert f"--{name}" in text, name
    assert "Weight of the per-token KL penalty" in text and "default: 0.05" in text


def test_every_field_is_documented():
    import inspect

    def visit(kind):
        source = inspect.getsource(kind)
        for field in dataclasses.fields(kind):
            value = getattr(kind(), field.name)
            if dataclasses.is_dataclass(value):
                visit(type(value))
            else:
                after = source.split(f"    {field.name}:", 1)[1].splitlines()[1].strip()
                assert after.startswith('"""'), f"{kind.__name__}.{field.name} has no docstring"

    visit(Config)


def sizes(**batch):
    cfg = Config()
    for name, value in batch.items():
        setattr(cfg.batch, name, value)
    return BatchSizes.derive(cfg)


def test_batch_arithmetic():
    got = sizes(episodes=1024, prompts_per_update=128, minibatches=2, micro_batch_size=16)
    assert (got.rollout, got.minibatch, got.micro_batch, got.updates, got.optimizer_steps) == (128, 64, 16, 8, 64)
    assert sizes().updates == 1953  # the paper's


@pytest.mark.parametrize(
    "batch, words",
    [
        (dict(episodes=1000, prompts_per_update=512), ["batch.episodes = 1000", "512", "use 512 or 1024"]),
        (dict(episodes=100, prompts_per_update=512), ["batch.episodes = 100", "512"]),
        (dict(episodes=0, prompts_per_update=512), ["batch.episodes"]),
        (dict(episodes=512, prompts_per_update=0), ["batch.prompts_per_update"]),
        (dict(episodes=512, prompts_per_update=512, minibatches=5), ["batch.minibatches = 5"]),
        (dict(episodes=512, prompts_per_update=512, micro_batch_size=100), ["batch.micro_batch_size = 100"]),
        (dict(episodes=-512, prompts_per_update=512), ["batch.episodes"]),
    ],
)
def test_inexact_batches_are_refused_by_name(batch, words):
    with pytest.raises(UserError) as caught:
        sizes(**batch)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("sft.lr", -1e-3, "must not be negative"),
        ("sft.lr", float("nan"), "must be a finite number"),
        ("ppo.lr", float("inf"), "must be a finite number"),
        ("sft.batch_size", 0, "must be at least 1"),
        ("reward.epochs", 0, "must be at least 1"),
        ("rollout.response_length", 0, "must be at least 1"),
        ("rollout.temperature", 0.0, "must be above 0"),
        ("ppo.gamma", 1.1, "must be at most 1"),
        ("batch.micro_batch_size", -2, "must be at least 1"),
        ("ppo.clip", -0.2, "must not be negative"),
        ("checkpoint.every", -1, "must not be negative"),
    ],
)
def test_impossible_numbers_are_refused_by_name(field, value, rule):
    cfg = Config()
    section, _, name = field.partition(".")
    setattr(getattr(cfg, section), name, value)
    with pytest.raises(UserError, match=re.escape(f"{field} is {value}; it {rule}")):
        check_values(cfg)


def test_the_defaults_can_be_used():
    check_values(Config())


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("ppo.preset", "referense", "ppo.preset is 'referense'; it must be default or reference"),
        ("rollout.engine", None, "rollout.engine is None; it must be native or hf"),
        ("ppo.klcoef", 3, "there is no field ppo.klcoef; did you mean ppo.kl_coef?"),
        ("ppo.lr", "1e-5", "ppo.lr is '1e-5'; it must be a number"),
        ("batch.prompts_per_update", 8.0, "batch.prompts_per_update is 8.0; it must be a whole number"),
        ("ppo.whiten_rewards", 1, "ppo.whiten_rewards is 1; it must be true or false"),
        ("ppo", None, "ppo is None; it must be a section of fields"),
        ("model.dtype", "float16", "model.dtype is 'float16'; it must be float32 or bfloat16"),
    ],
)
def test_what_python_lets_anyone_assign_is_checked(field, value, said):
    cfg = Config()
    section, _, name = field.rpartition(".")
    setattr(getattr(cfg, section) if section else cfg, name, value)
    with pytest.raises(UserError, match=re.escape(said)):
        check_values(cfg)


def test_paths_and_numpy_numbers_become_plain(tmp_path):
    import numpy as np

    cfg = Config(output_dir=tmp_path, seed=np.int64(3))
    cfg.ppo.lr, cfg.ppo.kl_coef = np.float64(1e-5), 1
    check_values(cfg)
    assert cfg.output_dir == str(tmp_path)
    assert [type(x) for x in (cfg.seed, cfg.ppo.lr, cfg.ppo.kl_coef)] == [int, float, float]
    config_to_yaml(cfg)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sft: {lr: 1.0e-3}\nseed: 2\nsft: {batch_size: 4}\n", "line 3 is not valid YAML: 'sft' stands twice"),
        ("ppo: null\n", "ppo must be a mapping"),
    ],
)
def test_yaml_that_would_lose_something(tmp_path, text, said):
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=re.escape(said)):
        parse("--config", str(file))
