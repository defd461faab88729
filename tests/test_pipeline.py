"""The whole pipeline on tiny data: what it writes, and that what it writes can be used."""

import json

import pytest
import torch


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_run_leaves_everything_it_promises(finished):
    for name in ("config.yaml", "summary.json", "samples.jsonl", "evaluation.jsonl", "ppo/critic/config.json"):
        assert (finished / name).is_file(), name
    for stage in ("sft", "reward", "ppo"):
        assert (finished / stage / "done.json").is_file()
        assert (finished / stage / "model" / "model.safetensors").is_file()
        assert list((finished / "checkpoints" / stage).glob("step_*"))
        assert list((finished / "tensorboard" / stage).glob("events.out.tfevents.*"))
    steps = [(row["stage"], row["step"]) for row in lines(finished / "metrics.jsonl")]
    assert [s for s in steps if s[0] == "ppo"] == [("ppo", 1), ("ppo", 2), ("ppo", 3)]
    assert len(set(steps)) == len(steps)
    summary = json.loads((finished / "summary.json").read_text())
    assert {"sft", "rm", "ppo", "seconds", "samples"} <= summary.keys()
    sample = lines(finished / "samples.jsonl")[0]
    assert {"stage", "step", "prompt", "response", "ended", "score", "kl"} <= sample.keys()
    assert not list(finished.rglob(".tmp-*"))
    assert not [p for p in finished.rglob("*") if p.suffix in (".pt", ".bin", ".pkl")]


def test_the_policy_is_an_ordinary_hugging_face_folder(finished):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = finished / "ppo" / "model"
    policy, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("The red cat went", return_tensors="pt")["input_ids"]
    out = policy.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    assert tokenizer.decode(out[0]).startswith("The red cat went")
    sft = AutoModelForCausalLM.from_pretrained(finished / "sft" / "model")
    assert any(not torch.equal(a, b) for a, b in zip(policy.parameters(), sft.parameters(), strict=True))


def test_a_saved_reward_model_gives_the_same_rewards(tiny_config, finished, tmp_path, monkeypatch):
    import numpy as np

    from fastrlhf import pipeline
    from fastrlhf.models import ScalarModel, load_scalar_model
    from fastrlhf.reward import rewards

    kept = []
    save = pipeline._save_model
    monkeypatch.setattr(pipeline, "_save_model", lambda m, t, folder: (kept.append(m), save(m, t, folder)))
    result = pipeline.run_reward(tiny_config(tmp_path / "run", **{"model.path": str(finished / "sft/model")}))
    cfg = tiny_config(None)
    loaded, plain = load_scalar_model(str(result.model), cfg.model).eval(), ScalarModel.from_pretrained(result.model)
    rows = [np.arange(1, n + 1) % 250 for n in (3, 9, 20)]
    with torch.no_grad():
        ours = rewards(kept[0].eval(), rows)
        assert torch.equal(ours, rewards(loaded, rows))
        torch.testing.assert_close(rewards(plain.eval(), rows), ours, rtol=0, atol=1e-6)
    assert loaded.config.bias == result.metrics["bias"] != 0
    assert (result.model / "model.safetensors").read_bytes() == (
        finished / "reward/model/model.safetensors"
    ).read_bytes()


def test_a_reward_model_is_a_function_of_texts(finished):
    from transformers import AutoTokenizer

    from fastrlhf import load_reward_model
    from fastrlhf.errors import UserError
    from fastrlhf.models import ScalarModel

    folder = finished / "reward" / "model"
    score = load_reward_model(str(folder), tokens_per_forward=24)
    prompts, responses = ["The red cat", "A", "Where is it? It is"], [" went home", "", " here, I think, or there"]
    got = score(prompts, responses)
    alone = [score([p], [r])[0] for p, r in zip(prompts, responses, strict=True)]
    assert score([], []) == [] and alone == pytest.approx(got, abs=1e-6)
    with pytest.raises(ValueError):
        score(prompts, responses[:2])
    with pytest.raises(UserError, match="not a reward model"):
        load_reward_model(str(finished / "sft" / "model"))
    # As transformers' users call it: everything the tokenizer gives, padded on the right, read at the last token.
    tokenizer, model = AutoTokenizer.from_pretrained(folder), ScalarModel.from_pretrained(folder).eval()
    texts = [p + r + tokenizer.eos_token for p, r in zip(prompts, responses, strict=True)]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right", return_token_type_ids=True)
    values = model(**inputs).gather(1, inputs.attention_mask.sum(1, keepdim=True) - 1)[:, 0]
    assert values.tolist() == pytest.approx(got, abs=1e-5)


def test_the_references_average_zero(tiny_config, finished):
    from fastrlhf.data import prepare as data
    from fastrlhf.models import ScalarModel
    from fastrlhf.reward import rewards

    cfg = tiny_config(None, **{"model.path": str(finished / "sft/model"), "model.train_tokenizer": None})
    train, _ = data.sft_examples(cfg, data.read(cfg, "sft"), data.load_tokenizer_of(cfg))
    model = ScalarModel.from_pretrained(finished / "reward" / "model").eval()
    with torch.no_grad():
        got = rewards(model, [[*e.query, *e.response] for e in train])
    assert abs(float(got.mean())) < 1e-5


def test_the_python_api_does_each_stage_alone(tiny_config, finished, tmp_path):
    from fastrlhf import Config, run_ppo, run_reward, run_sft

    cfg = tiny_config(tmp_path / "sft")
    assert isinstance(cfg, Config)
    sft = run_sft(cfg)
    start = {"model.path": str(sft.model), "model.from_scratch": None, "model.train_tokenizer": None}
    reward = run_reward(tiny_config(tmp_path / "reward", **start))
    ppo = run_ppo(tiny_config(tmp_path / "ppo", **start, **{"ppo.reward_model": str(reward.model)}))
    for stage, result in (("sft", sft), ("reward", reward), ("ppo", ppo)):
        assert result.run == tmp_path / stage and result.model == tmp_path / stage / stage / "model"
        ours, theirs = (folder / "model.safetensors" for folder in (result.model, finished / stage / "model"))
        assert ours.read_bytes() == theirs.read_bytes(), stage
    assert sft.metrics["eval_loss"] < sft.metrics["eval_loss_before"]
    assert "objective/kl" in ppo.metrics
    # The critic is trained from the reward model.
    critic = (tmp_path / "ppo" / "ppo" / "critic" / "model.safetensors").read_bytes()
    assert critic != (reward.model / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def function_module(tmp_path_factory):
    import sys

    folder = tmp_path_factory.mktemp("function")
    (folder / "tiny_rewards.py").write_text("def length(prompts, responses):\n    return [len(r) for r in responses]\n")
    sys.path.insert(0, str(folder))
    yield "tiny_rewards:length"
    sys.path.remove(str(folder))


@pytest.mark.parametrize("command", ["ppo", "run"])
def test_a_reward_function_takes_the_place_of_the_model(tiny_config, finished, tmp_path, function_module, command):
    from fastrlhf import run_pipeline, run_ppo

    start = {"model.path": str(finished / "sft/model"), "model.from_scratch": None, "model.train_tokenizer": None}
    more = {"ppo.reward_function": function_module}
    cfg = tiny_config(tmp_path / "run", **(start | more if command == "ppo" else more))
    if command == "ppo":
        run_ppo(cfg)
    else:
        summary = run_pipeline(cfg)
        assert "rm" not in summary and "reward_win_rate_vs_sft" in summary["ppo"]
    assert not (tmp_path / "run" / "reward").exists()
    for row in lines(tmp_path / "run" / "samples.jsonl"):
        assert row["score"] == len(row["response"])


@pytest.mark.parametrize("reward", ["model", "function"])
@pytest.mark.parametrize("reduction", ["minibatch", "microbatch"])
@pytest.mark.parametrize("old", ["recompute", "sampler"])
def test_recordings_replay(tiny_config, finished, tmp_path, function_module, reduction, old, reward):
    from fastrlhf import run_ppo
    from fastrlhf.replay import replay

    given = {"ppo.reward_model": str(finished / "reward/model")}
    cfg = tiny_config(
        tmp_path / "run",
        **{
            "model.path": str(finished / "sft/model"),
            "model.from_scratch": None,
            "model.train_tokenizer": None,
            "ppo.record_rollouts": True,
            "ppo.loss_reduction": reduction,
            "ppo.old_logprobs": old,
            "ppo.whiten_rewards": reduction == "microbatch",
            "ppo.missing_eos_score": -1.0 if old == "recompute" else None,
            "ppo.max_grad_norm": 0.5 if reduction == "minibatch" else None,
            "batch.micro_batch_size": 2 if reduction == "microbatch" else None,
        },
        **(given if reward == "model" else {"ppo.reward_function": function_module}),
    )
    run_ppo(cfg)
    recordings = sorted((tmp_path / "run" / "ppo" / "recordings").glob("*.json"))
    assert [p.stem for p in recordings] == [f"update_{u:08d}" for u in range(3)]
    for path in recordings:
        errors = replay(str(path))
        assert {"final policy", "final critic", "scores", "advantages"} <= errors.keys()
        assert max(errors.values()) <= 5e-6, errors


def test_evaluate_measures_a_saved_policy(cli, tiny_config, finished, tmp_path):
    start = {"model.path": str(finished / "ppo/model"), "ppo.reward_model": str(finished / "reward/model")}
    done = cli("evaluate", tiny_config(tmp_path / "run", **start))
    assert done.rc == 0, done.err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())["evaluate"]
    rows = lines(tmp_path / "run" / "samples.jsonl")
    assert summary["rows"] == len(rows) > 0
    assert {"rougeL", "distinct_2", "response_length", "ended", "score"} <= summary.keys()
    assert summary["score"] == pytest.approx(sum(row["score"] for row in rows) / len(rows))
    # The same policy, prompts and stream name apart, as in the run's own summary.
    assert "evaluate.rougeL" in done.out


def test_our_own_recordings_replay_to_the_last_bit_in_another_family(tiny_config, tmp_path):
    """Absolute positions, tied weights, another name for the width; layout and token budgets are recorded."""
    from fastrlhf import pipeline
    from fastrlhf.replay import replay

    shape = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 128}
    overrides = {"model.from_scratch": shape, "ppo.record_rollouts": True, "batch.tokens_per_micro_batch": 40}
    pipeline.run_pipeline(tiny_config(tmp_path / "run", **overrides))
    recordings = sorted((tmp_path / "run/ppo/recordings").glob("*.json"))
    assert len(recordings) == 3
    for recording in recordings:
        assert max(replay(str(recording)).values()) == 0


def test_a_name_that_looks_like_markup_is_printed_as_it_is(cli, tiny_config, finished, tmp_path):
    folder = tmp_path / "[red]run[/]"
    done = cli("evaluate", tiny_config(folder, **{"model.path": str(finished / "ppo/model")}))
    assert done.rc == 0, done.err
    assert "[red]run[/]" in "".join(done.out.split()) and (folder / "summary.json").is_file()
