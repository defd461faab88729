"""`fastrlhf replay` on recordings of the reference code, and on recordings that somebody changed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fastrlhf.cli import main
from fastrlhf.errors import UserError
from fastrlhf.replay import replay

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden"
PPO = (
    "lr scores logprobs ref_logprobs values rewards advantages returns new_logprobs vpred pg_loss vf_loss loss "
    "pg_clipfrac vf_clipfrac ratio_mean approxkl entropy sequence_lengths padding_mask padding_mask_p1 "
    "postprocessed_responses"
)
QUANTITIES = {
    "ppo_a": {*PPO.split(), "final policy", "final critic"},
    "ppo_b": {*PPO.split(), "final policy", "final critic"},
    "sft": {"loss", "lr", "final"},
    "reward": {"loss", "lr", "bias", "final"},
}


@pytest.mark.parametrize("name", QUANTITIES)
@pytest.mark.parametrize("ending", ["", ".json", ".safetensors"])
def test_the_reference_is_met(name, ending, capsys):
    assert main(["replay", str(GOLDEN / f"{name}{ending}"), "--max_error", "5e-6"]) == 0
    out = capsys.readouterr().out
    for quantity in QUANTITIES[name]:
        assert any(line.startswith(quantity) for line in out.splitlines()), quantity
    assert "passed: largest" in out.splitlines()[-1]


def test_nobody_can_take_the_output():
    """A full disk behind standard output, and a reader such as `head` that has gone."""
    command = [sys.executable, "-m", "fastrlhf.cli", "replay", str(GOLDEN / "sft")]
    env = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    env["PYTHONPATH"] = f"{ROOT}:{ROOT / 'kernels'}"
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, env=env, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and "no disk space left" in done.stderr
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, env=env, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    """`copied(name, change)` -> the basename of a changed recording."""

    def make(name, change):
        base = tmp_path_factory.mktemp("recording") / name
        meta = json.loads((GOLDEN / f"{name}.json").read_text())
        tensors = load_file(GOLDEN / f"{name}.safetensors")
        change(meta, tensors)
        base.with_suffix(".json").write_text(json.dumps(meta))
        save_file(tensors, base.with_suffix(".safetensors"))
        return str(base)

    return make


# Inputs are left out: changing them changes what is replayed.
INPUTS = ("queries", "query_responses", "inds", "perm")
RECORDED = [
    key
    for key in sorted(load_file(GOLDEN / "ppo_a.safetensors"))
    if key.startswith("update1.") and ".micro" not in key and not any(name in key for name in INPUTS)
]


@pytest.mark.parametrize("key", RECORDED)
def test_no_tensor_is_compared_with_itself(copied, key):
    """A recorded number that is changed by little must show up."""

    def change(meta, tensors):
        t = tensors[key]
        if t.dtype == torch.bool:
            t.view(-1)[0] = ~t.view(-1)[0]
        else:
            t.view(-1)[0] += 1 if not t.is_floating_point() else 1e-3

    try:
        worst = replay(copied("ppo_a", change))
    except UserError:
        return  # changed responses or shapes may be refused
    assert max(worst.values()) > 5e-6, key


@pytest.mark.parametrize(
    "key", ["pg_loss", "vf_loss", "loss", "pg_clipfrac", "vf_clipfrac", "ratio_mean", "approxkl", "entropy"]
)
def test_statistics_are_compared(copied, key):
    def change(meta, tensors):
        meta["updates"][1]["micro"][-1][key] += 1e-3

    worst = replay(copied("ppo_b", change))
    assert worst[key] > 5e-4 and all(error < 5e-6 for name, error in worst.items() if name != key)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("ppo_a", lambda m, t: m["args"]["ppo"].update(kl_coef=0.0501)),
        ("ppo_a", lambda m, t: m["args"]["ppo"].update(lam=0.951)),
        ("ppo_a", lambda m, t: m["args"]["ppo"].update(gamma=0.999)),
        ("ppo_a", lambda m, t: m["args"]["ppo"].update(cliprange=0.201)),
        ("ppo_a", lambda m, t: m["args"]["ppo"].update(cliprange_value=0.201)),
        ("ppo_a", lambda m, t: m["args"]["ppo"].update(vf_coef=0.101)),
        ("ppo_a", lambda m, t: m["args"]["ppo"].update(whiten_rewards=not m["args"]["ppo"]["whiten_rewards"])),
        ("ppo_a", lambda m, t: m["args"].update(penalty_reward_value=-1.01)),
        ("ppo_a", lambda m, t: m["args"].update(temperature=0.701)),
        ("ppo_a", lambda m, t: m["args"].update(eps=1.1e-5)),
        ("ppo_a", lambda m, t: m["args"].update(lr=1.001e-3)),
        ("ppo_b", lambda m, t: m["args"].update(loss_reduction="minibatch")),
        ("ppo_a", lambda m, t: m.update(reward_bias=(m.get("reward_bias") or 0.0) + 1e-3)),
        ("ppo_a", lambda m, t: m.update(critic_bias=(m.get("critic_bias") or 0.0) + 1e-3)),
        ("sft", lambda m, t: t.update({next(k for k in t if k.startswith("final")): torch.tensor(0.0)})),
    ],
)
def test_every_setting_matters(copied, name, change):
    try:
        worst = replay(copied(name, change))
    except UserError:
        return
    assert max(worst.values()) > 5e-6


UPDATE = load_file(GOLDEN / "ppo_a.safetensors")
INTEGERS = ["update0.queries", "update0.responses", "update0.perm0", "update0.sequence_lengths", "update0.micro0.inds"]


@pytest.mark.parametrize(
    "key",
    [k for k in sorted(UPDATE) if k.startswith(("update0.", "init.reward.scalar")) and "postprocessed" not in k
     and "query_responses" not in k],
)  # fmt: skip
def test_what_is_missing_is_not_passed_over(copied, key):
    with pytest.raises(UserError, match="lacks|does not fit"):
        replay(copied("ppo_a", lambda m, t: t.pop(key)))


def _drop(prefix):
    def change(meta, tensors):
        for key in [key for key in tensors if key.startswith(prefix)]:
            del tensors[key]

    return change


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("ppo_a", _drop("init.reward."), "does not fit the model"),
        ("ppo_a", lambda m, t: m.update(reward_bias=None), "weights of a reward model"),
        ("ppo_a", _drop("update0.micro"), "lacks 'update0.micro0"),
        ("ppo_a", lambda m, t: m["updates"][0].update(micro=[{}] * 4), "lacks 'pg_loss'"),
        ("ppo_a", lambda m, t: m["args"].update(loss_reduction="token"), "loss_reduction is 'token'; microbatch and"),
        ("ppo_a", lambda m, t: m["args"].update(old_logprobs="none"), "old_logprobs is 'none'"),
        ("ppo_a", lambda m, t: m["args"].update(whiten_scope="none"), "whiten_scope is 'none'"),
        ("ppo_a", lambda m, t: m.update(layout="tigth"), "layout is 'tigth'; padded and tight"),
        ("ppo_a", lambda m, t: m.update(statistics="none"), "statistics is 'none'"),
        ("sft", lambda m, t: t.update({"micro0.tokens": t["micro0.tokens"].float()}), "is torch.float32, it has to"),
        ("reward", lambda m, t: m.pop("normalisation"), "normalisation"),
        ("reward", lambda m, t: t.pop("normalisation.query_reference_response_token"), "lacks 'normalisation"),
        *[("ppo_a", lambda m, t, k=k: t.update({k: t[k].float()}), "it has to be torch.int64") for k in INTEGERS],
        (
            "ppo_a",
            lambda m, t: t.update({"update0.values": t["update0.values"].double()}),
            "it has to be torch.float32",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(copied, name, change, said):
    with pytest.raises(UserError, match=said):
        replay(copied(name, change))


def test_the_eos_flags_are_compared(copied):
    eos = (UPDATE["update0.postprocessed_responses"] == 0).any(1)
    assert replay(copied("ppo_a", lambda m, t: t.update({"update0.has_eos": eos})))["has_eos"] == 0
    assert replay(copied("ppo_a", lambda m, t: t.update({"update0.has_eos": ~eos})))["has_eos"] == 1


def test_exit_codes(copied, tmp_path, capsys):
    off = copied("reward", lambda m, t: m.update(bias=1.0) if "bias" in m else t.clear())
    assert main(["replay", off]) in (1, 2)
    assert main(["replay", str(GOLDEN / "sft"), "--max_error", "0"]) == 1
    assert "ABOVE THE LIMIT" in capsys.readouterr().out
    for bad, said in (
        (tmp_path / "nothing", "does not exist"),
        (copied("sft", lambda m, t: m.update(kind="dpo")), "kind 'dpo'"),
        (copied("sft", lambda m, t: m.pop("model")), "lacks 'model'"),
        (copied("ppo_a", lambda m, t: t.pop("update0.queries")), "lacks 'update0.queries'"),
    ):
        assert main(["replay", str(bad)]) == 2
        assert said in capsys.readouterr().err
    # Damage beyond a missing key; a wrong shape in Adam's state once ended the process.
    adam = next(k for k in load_file(GOLDEN / "ppo_a.safetensors") if k.startswith("init.") and k.endswith("weight"))
    for name, change in (
        ("ppo_a", lambda m, t: t.update({adam: t[adam].flatten()[:1].clone()})),
        ("ppo_a", lambda m, t: m.update(updates=[])),
        ("ppo_a", lambda m, t: m["updates"][0].pop("micro")),
        ("ppo_a", lambda m, t: m["args"].pop("ppo")),
        ("ppo_a", lambda m, t: m.update(model={"hidden_size": 7})),
        ("ppo_a", lambda m, t: m.update(args=[])),
        ("ppo_a", lambda m, t: t.update({"update0.queries": t["update0.queries"].float() * 1e9})),
        ("sft", lambda m, t: m["args"].clear()),
        ("reward", lambda m, t: m["args"].clear()),
    ):
        assert main(["replay", copied(name, change)]) == 2
        assert "replay: " in capsys.readouterr().err
    torn = tmp_path / "torn"
    shutil.copy(GOLDEN / "sft.json", torn.with_suffix(".json"))
    torn.with_suffix(".safetensors").write_bytes((GOLDEN / "sft.safetensors").read_bytes()[:100])
    assert main(["replay", str(torn)]) == 2
    assert "not a readable recording" in capsys.readouterr().err
