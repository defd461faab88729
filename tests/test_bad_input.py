"""What a user can get wrong: exit code 2, one sentence that names it, nothing left behind and nothing overwritten."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).parents[1]

REWARDS = """
def good(prompts, responses):
    return [float(len(r)) for r in responses]

def short(prompts, responses):
    return [1.0] * (len(responses) - 1)

def nan(prompts, responses):
    return [1.0, 1.0, float("nan")] + [1.0] * (len(responses) - 3)

def words(prompts, responses):
    return [1.0] * (len(responses) - 1) + ["much"]

def one(prompts, responses):
    return 1.0

def raises(prompts, responses):
    if len(prompts) > 1 or "horse went" in prompts[0]:
        raise KeyError("two\\nlines")
    return [1.0]

def exits(prompts, responses):
    raise SystemExit(0)

async def later(prompts, responses):
    return [1.0] * len(responses)

def huge(prompts, responses):
    return [1e300] * len(responses)
"""


class Opened:
    """Unpickling makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.fixture(scope="module")
def bench(finished, rows, tmp_path_factory):
    """A folder with broken copies of everything."""
    from fastrlhf.data.tokenize import train_tokenizer

    root = tmp_path_factory.mktemp("bad")
    (root / "rewards.py").write_text(REWARDS)
    (root / "broken_rewards.py").write_text("def f(:\n")
    (root / "empty.jsonl").write_text("\n\n")
    (root / "torn.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "a", "compl\n')
    (root / "columns.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    (root / "null.jsonl").write_text('{"prompt": "a", "completion": null}\n')
    sft, reward = finished / "sft" / "model", finished / "reward" / "model"

    copy = shutil.copytree(sft, root / "no_eos")
    settings = json.loads((copy / "tokenizer_config.json").read_text())
    settings.pop("eos_token")
    (copy / "tokenizer_config.json").write_text(json.dumps(settings))

    copy = shutil.copytree(sft, root / "no_config")
    (copy / "config.json").unlink()

    for source, name in ((sft, "pickle"), (reward, "pickle_reward")):
        copy = shutil.copytree(source, root / name)
        (copy / "model.safetensors").unlink()
        (copy / "pytorch_model.bin").write_bytes(pickle.dumps({"w": Opened(str(root / "unpickled"))}))

    copy = shutil.copytree(sft, root / "torn_weights")
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])

    for source, name, change in (
        (sft, "poisoned", lambda c, w: next(iter(w.values())).view(-1)[3:4].fill_(float("nan"))),
        (reward, "poisoned_reward", lambda c, w: w["scalar_head.bias"].fill_(float("inf"))),
        (sft, "misshapen", lambda c, w: c.update(intermediate_size=48)),
        (sft, "no_heads", lambda c, w: c.update(num_attention_heads=0)),
        (reward, "short_reward", lambda c, w: c["base_config"].update(max_position_embeddings=8)),
    ):
        copy = shutil.copytree(source, root / name)
        config, tensors = json.loads((copy / "config.json").read_text()), load_file(copy / "model.safetensors")
        change(config, tensors)
        (copy / "config.json").write_text(json.dumps(config))
        save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})

    (root / "long.jsonl").write_text(json.dumps({"prompt": "far too many words " * 50}) + "\n")
    (root / "latin1.csv").write_bytes("prompt,compl\xe9tion\na,b\n".encode("latin-1"))
    text = pyarrow.array([b"a\xff"], type=pyarrow.binary()).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"prompt": text, "completion": text}), root / "bytes.parquet")

    copy = shutil.copytree(reward, root / "other_tokenizer")
    train_tokenizer(["quite other words in here"] * 3, 270, copy)

    (root / "file").write_text("a file")
    (root / "loop").symlink_to(root / "loop")
    run = root / "run"
    shutil.copytree(finished, run)
    return root


# name: command, overrides ({} is the folder of `bench`), words of the sentence
TYPO = {"model_type": "gpt_neox", "hiden_size": 16}
SHORT = {"model_type": "gpt_neox", "hidden_size": 16, "num_attention_heads": 2, "max_position_embeddings": 8}
CASES = {
    "missing file": ("sft", {"data.sft": "{}/emty.jsonl"}, ["data.sft", "emty.jsonl does not exist", "empty.jsonl?"]),
    "missing pairs": ("run", {"data.preferences": None}, ["data.preferences is not set"]),
    "wrong columns": ("sft", {"data.sft": "{}/columns.jsonl"}, ["data.sft", ":1", "question", "prompt and completion"]),
    "null column": ("sft", {"data.sft": "{}/null.jsonl"}, ["data.sft", ":1", "completion"]),
    "empty data": ("sft", {"data.sft": "{}/empty.jsonl"}, ["data.sft", "empty.jsonl has no rows"]),
    "invalid JSON": ("sft", {"data.sft": "{}/torn.jsonl"}, ["data.sft", "torn.jsonl:2 is not valid JSON"]),
    "unknown model type": ("sft", {"model.from_scratch": {"model_type": "gpt_nixx"}}, ["model type 'gpt_nixx'"]),
    "too long for the model": ("sft", {"model.from_scratch": SHORT}, ["data.max_query_length", "ends at 8"]),
    "a number no fp32 holds": ("ppo", {"ppo.clip": 1e300, "ppo.reward_function": "rewards:good"}, ["ppo.clip", "3e38"]),
    "a number no run can use": ("sft", {"sft.batch_size": 0}, ["sft.batch_size is 0; it must be at least 1"]),
    "model twice": ("sft", {"model.path": "{}/run/sft/model"}, ["model.path and model.from_scratch are both set"]),
    "tokenizer twice": ("sft", {"model.tokenizer": "{}/run/sft/model"}, ["model.train_tokenizer are both"]),
    "tokenizer of a trained model": (
        "sft",
        {"model.path": "{}/run/sft/model", "model.from_scratch": None},
        ["model.path and model.train_tokenizer are both set"],
    ),
    "micro-batch without its mean": (
        "ppo",
        {"batch.micro_batch_size": 2, "ppo.reward_function": "rewards:good"},
        ["batch.micro_batch_size", "ppo.loss_reduction: microbatch"],
    ),
    "shape": (
        "sft",
        {"model.from_scratch": {"model_type": "gpt_neox", "hidden_size": 33}},
        ["gpt_neox refuses this shape", "hidden size is not divisible"],
    ),
    "no model": ("sft", {"model.from_scratch": None}, ["model.path is not set"]),
    "model folder missing": ("reward", {"model.path": "{}/nowhere"}, ["nowhere"]),
    "no config.json": ("reward", {"model.path": "{}/no_config"}, ["model.path", "no_config", "no config.json"]),
    "no EOS": ("ppo", {"model.path": "{}/no_eos", "ppo.reward_function": "rewards:good"}, ["no_eos", "no EOS token"]),
    "pickle": ("reward", {"model.path": "{}/pickle"}, ["model.path", "/pickle"]),
    "pickled reward model": ("ppo", {"ppo.reward_model": "{}/pickle_reward"}, ["ppo.reward_model", "pickle_reward"]),
    "torn weights": ("reward", {"model.path": "{}/torn_weights"}, ["model.path", "torn_weights"]),
    "other tokenizer": ("ppo", {"ppo.reward_model": "{}/other_tokenizer"}, ["ppo.reward_model", "another tokenizer"]),
    "policy as reward model": ("ppo", {"ppo.reward_model": "{}/run/sft/model"}, ["not a reward model"]),
    "later: pairs": ("run", {"data.preferences": "{}/torn.jsonl"}, ["data.preferences", "torn.jsonl:1 has columns"]),
    "later: reward model": ("run", {"ppo.reward_model": "{}/other_tokenizer"}, ["has another tokenizer"]),
    "later: prompts": (
        "run",
        {"data.prompts": "{}/long.jsonl", "data.prompts_eval": "{}/long.jsonl"},
        ["data.max_query_length", "rollout.response_length", "ends at 128"],
    ),
    "NaN weights": ("reward", {"model.path": "{}/poisoned"}, ["model.path", "poisoned holds weights that are not fin"]),
    "infinite reward": ("ppo", {"ppo.reward_model": "{}/poisoned_reward"}, ["ppo.reward_model", "scalar_head.bias"]),
    "misshapen": ("reward", {"model.path": "{}/misshapen"}, ["another shape than its config.json says", "mlp"]),
    "no heads": ("reward", {"model.path": "{}/no_heads"}, ["cannot load", "no_heads"]),
    "short reward": ("ppo", {"ppo.reward_model": "{}/short_reward"}, ["the reward model ends at 8"]),
    "latin-1": ("sft", {"data.sft": "{}/latin1.csv"}, ["data.sft", "latin1.csv is not a readable CSV"]),
    "bytes": ("sft", {"data.sft": "{}/bytes.parquet"}, ["data.sft", "bytes.parquet"]),
    "recording in bfloat16": (
        "ppo",
        {"ppo.record_rollouts": True, "model.dtype": "bfloat16", "ppo.reward_function": "rewards:good"},
        ["ppo.record_rollouts needs model.dtype float32"],
    ),
    "no reward": ("ppo", {}, ["ppo needs a reward"]),
    "function: form": ("ppo", {"ppo.reward_function": "rewards"}, ["'rewards' is not of the form module:name"]),
    "function: module": ("ppo", {"ppo.reward_function": "no_such:f"}, ["cannot import 'no_such'"]),
    "function: syntax": ("ppo", {"ppo.reward_function": "broken_rewards:f"}, ["broken_rewards", "SyntaxError"]),
    "function: name": ("ppo", {"ppo.reward_function": "rewards:god"}, ["'rewards' has no function 'god'"]),
    "function: length": ("ppo", {"ppo.reward_function": "rewards:short"}, ["7 values for 8 responses"]),
    "function: NaN": ("ppo", {"ppo.reward_function": "rewards:nan"}, ["returned nan at row 2 (prompt ending 'The"]),
    "function: text": ("ppo", {"ppo.reward_function": "rewards:words"}, ["returned 'much', not a number at row 7"]),
    "function: scalar": ("ppo", {"ppo.reward_function": "rewards:one"}, ["returned float"]),
    "function: exits": ("ppo", {"ppo.reward_function": "rewards:exits"}, ["raised SystemExit"]),
    "function: async": ("ppo", {"ppo.reward_function": "rewards:later"}, ["returned coroutine"]),
    "function: huge": ("ppo", {"ppo.reward_function": "rewards:huge"}, ["returned 1e+300 at row 0"]),
    "from_scratch typo": ("sft", {"model.from_scratch": TYPO}, ["no field 'hiden_size'; did you mean hidden_size?"]),
    "markup": ("sft", {"output_dir": "{}/file/[red]x[/]"}, ["file/[red]x[/]"]),
    "other command": ("sft", {"output_dir": "{}/run", "resume": True}, ["was started by `fastrlhf run`"]),
    "function: exception": ("ppo", {"ppo.reward_function": "rewards:raises"}, ["KeyError: 'two\\nlines'", "row"]),
    "output_dir under a file": ("sft", {"output_dir": "{}/file/run"}, ["cannot read or write", "file/run"]),
    "output_dir is a file": ("sft", {"output_dir": "{}/file"}, ["output_dir", "is a file"]),
    "existing run": ("run", {"output_dir": "{}/run"}, ["output_dir", "is not empty", "--resume"]),
    "changed configuration": (
        "run",
        {"output_dir": "{}/run", "ppo.kl_coef": 0.9, "resume": True},
        ["ppo.kl_coef was 0.05 and is 0.9", "leave --config"],
    ),
    "resume of nothing": ("run", {"output_dir": "{}/nothing", "resume": True}, ["resume", "is not a run folder"]),
    "model type, nearly": (
        "sft",
        {"model.from_scratch": {"model_type": "gpt_neoxx"}},
        ["unknown model type 'gpt_neoxx'; did you mean gpt_neox?"],
    ),
    "another EOS": ("sft", {"model.from_scratch": {"model_type": "gpt_neox", "eos_token_id": 5}}, ["EOS is 0"]),
    "run folder as model": ("reward", {"model.path": "{}/run"}, ["no config.json); did you mean", "/run/sft/model?"]),
    "run folder as reward": ("ppo", {"ppo.reward_model": "{}/run"}, ["/run/reward/model?"]),
    "file as function": ("ppo", {"ppo.reward_function": "./rewards.py:good"}, ["not a module", "give rewards:good"]),
    "relative function": ("ppo", {"ppo.reward_function": ".rewards:good"}, ["not a module", "give rewards:good"]),
    "no .json": ("sft", {"data.sft": "{}/nowhere.json"}, ["data.sft", "nowhere.json does not exist"]),
    "held-out prompts": ("ppo", {"data.prompts_eval": "{}/no.jsonl", "ppo.reward_function": "rewards:good"},
        ["data.prompts_eval: ", "no.jsonl does not exist"]),
    "too long a name": ("sft", {"output_dir": "{}/" + "x" * 300}, ["File name too long"]),
    "a loop of links": ("sft", {"output_dir": "{}/loop/run"}, ["loop"]),
    "null character": ("sft", {"output_dir": "{}/a\0b"}, ["output_dir is", "give it a value"]),
    "no tokenizer": ("sft", {"model.tokenizer": ""}, ["model.tokenizer is ''"]),
    "too many ids": ("sft", {"model.train_tokenizer": 10**12}, ["model.train_tokenizer", "1,000,000"]),
    "tracker": ("sft", {"log.wandb": True}, ["log.wandb needs a package; pip install 'fastrlhf[wandb]'"]),
    "resume of what?": ("run", {"output_dir": None, "resume": True}, ["resume", "--output_dir"]),
}  # fmt: skip


def contents(root):
    files = [p for p in root.rglob("*") if p.is_file() and p.name != ".lock" and "__pycache__" not in p.parts]
    return {str(p.relative_to(root)): p.read_bytes() for p in files}


@pytest.fixture(scope="module")
def answers(bench, cli, tiny_config):
    before = contents(bench)
    jobs = []
    for i, (command, overrides, _) in enumerate(CASES.values()):
        given = {k: v.format(bench) if isinstance(v, str) else v for k, v in overrides.items()}
        if command != "sft":
            given = {"model.path": str(bench / "run" / "sft" / "model")} | given
        if command in ("reward", "ppo"):
            given |= {"model.from_scratch": None, "model.train_tokenizer": None}
        elif "output_dir" in given:
            given["model.path"] = None
        if command == "run":
            given["model.path"] = None
        cfg = tiny_config(bench / f"new{i}", **given)
        jobs.append(cli.job(command, cfg, cwd=str(bench)))
    done = cli.many(jobs)
    return dict(zip(CASES, done, strict=True)), before, contents(bench)


@pytest.mark.parametrize("name", CASES)
def test_one_sentence_says_what_is_wrong(answers, name):
    done = answers[0][name]
    sentence = done.sentence()
    assert done.rc == 2 and "Traceback" not in done.err
    assert sentence.startswith(f"fastrlhf {CASES[name][0]}: ")
    for word in CASES[name][2]:
        assert word in sentence, sentence


def test_nothing_is_left_overwritten_or_unpickled(answers, bench):
    _, before, after = answers
    assert after == before
    assert not (bench / "unpickled").exists()
    assert not (bench / "nothing").exists()


# --- a run folder that somebody changed

DAMAGE = {
    "empty config": (lambda run: (run / "config.yaml").write_text(""), ["config.yaml lacks seed"]),
    "cut config": (lambda run: (run / "config.yaml").write_text("# fastrlhf run\nseed: 1\n"), ["lacks output_dir"]),
    "empty done": (lambda run: (run / "sft/done.json").write_text("{}"), ["sft/done.json is damaged"]),
    "list done": (lambda run: (run / "sft/done.json").write_text("[]"), ["sft/done.json is damaged"]),
    "folder done": (lambda run: folder(run / "sft/done.json"), ["sft/done.json is damaged"]),
    "file as stage": (lambda run: file(run / "sft"), ["/sft: File exists"]),
    "folder as lock": (lambda run: folder(run / ".lock"), [".lock: Is a directory"]),
    "folder as metrics": (
        lambda run: (file(run / "ppo/done.json"), folder(run / "metrics.jsonl")),
        ["done.json is dam"],
    ),
}


def folder(path):
    path.unlink(missing_ok=True)
    path.mkdir()


def file(path):
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    path.write_text("")


def test_a_changed_run_folder_is_a_sentence(cli, tiny_config, finished, tmp_path):
    jobs = []
    for name, (damage, _) in DAMAGE.items():
        run = shutil.copytree(finished, tmp_path / name)
        (run / "ppo/done.json").unlink()
        damage(run)
        jobs.append(cli.job("run", tiny_config(run, resume=True)))
    for (name, (_, words)), done in zip(DAMAGE.items(), cli.many(jobs), strict=True):
        assert done.rc == 2 and "Traceback" not in done.err, (name, done.err)
        assert all(word in done.sentence() for word in words), (name, done.sentence())


@pytest.mark.skipif(not shutil.which("setpriv"), reason="setpriv takes root's right to read everything")
def test_without_permission_to_read(tiny_config, finished, tmp_path):
    """Real permissions, which do not hold root back unless it gives that right away."""
    run = shutil.copytree(finished, tmp_path / "run")
    hidden, weights = tmp_path / "hidden", tmp_path / "model"
    shutil.copytree(finished / "sft/model", hidden / "model")
    shutil.copytree(finished / "sft/model", weights)
    shutil.copy(ROOT / "tests/golden/sft.json", tmp_path)
    shutil.copy(ROOT / "tests/golden/sft.safetensors", tmp_path)
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "a", "completion": "b"}\n')
    closed = [run / "sft/done.json", hidden, weights / "config.json", tmp_path / "sft.json", data]
    for path in closed:
        path.chmod(0)
    config = tmp_path / "config.yaml"
    config.write_text("{}")
    config.chmod(0)
    start = ["evaluate", "--data.sft", str(finished / "config.yaml")]
    try:
        sft = ["sft", "--data.sft", str(data), "--model.path", str(finished / "sft/model"), "--output_dir"]
        for args in (
            ["replay", str(tmp_path / "sft")],
            ["replay", str(hidden / "sft")],
            [*start, "--model.path", str(hidden / "model")],
            [*start, "--model.path", str(weights)],
            ["sft", "--config", str(config)],
            [*sft, str(tmp_path / "new")],
            [*sft, str(hidden / "x/y")],
            [*sft, str(hidden)],
            [*sft, str(hidden), "--resume"],
            ["run", "--config", str(run / "config.yaml"), "--output_dir", str(run), "--resume"],
        ):
            privileges = "-dac_override,-dac_read_search"
            drop = ["setpriv", f"--bounding-set={privileges}", f"--inh-caps={privileges}"]
            done = subprocess.run(
                [*(drop if os.geteuid() == 0 else []), sys.executable, "-m", "fastrlhf.cli", *args],
                env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"},
                cwd=tmp_path,
                capture_output=True,
                text=True,
            )
            assert done.returncode == 2 and "Permission denied" in done.stderr.splitlines()[-1], (args, done.stderr)
            assert "Traceback" not in done.stderr
    finally:
        for path in [*closed, config]:
            path.chmod(0o700)


def test_an_empty_folder_that_was_given_is_still_there(cli, tiny_config, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    assert cli("sft", tiny_config(folder, **{"data.sft": str(tmp_path / "typo.jsonl")})).rc == 2
    assert folder.is_dir() and not list(folder.iterdir())


def test_a_folder_in_which_nothing_was_made_is_free_again(cli, tiny_config, tmp_path, rows):
    folder = tmp_path / "run"
    assert cli("sft", tiny_config(folder, **{"data.sft": str(tmp_path / "typo.jsonl")})).rc == 2
    assert not folder.exists()
    done = cli("sft", tiny_config(folder))
    assert done.rc == 0, done.err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_write_permission(cli, tiny_config, tmp_path):
    tmp_path.chmod(0o500)
    done = cli("sft", tiny_config(tmp_path / "run"))
    tmp_path.chmod(0o700)
    assert done.rc == 2 and "cannot read or write" in done.sentence()


def test_a_second_process_on_the_same_folder_is_refused(cli, tiny_config, bench):
    from fastrlhf.config_parser import config_to_yaml
    from fastrlhf.loading import set_token_budgets
    from fastrlhf.run_folder import RunFolder

    (bench / "held").mkdir()
    shutil.copy(bench / "run" / "config.yaml", bench / "held")
    cfg = tiny_config(bench / "held", resume=True)
    set_token_budgets(cfg)
    before = contents(bench / "held")
    with RunFolder.open(cfg, "run", config_yaml=config_to_yaml(cfg)):
        done = cli("run", cfg)
    assert done.rc == 2 and "another process is writing" in done.sentence()
    assert contents(bench / "held") == before


# --- training that goes wrong


def checkpoints(folder, stage):
    return sorted(p.name for p in (folder / "checkpoints" / stage).glob("step_*"))


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_checkpoint(cli, tiny_config, bench, tmp_path):
    model = {"model.path": str(bench / "run/sft/model"), "model.from_scratch": None, "model.train_tokenizer": None}
    function = {**model, "ppo.reward_function": "rewards:good"}
    wild = {"ppo.lr": 1e30, "ppo.epochs": 1, "batch.minibatches": 1}
    jobs = [
        cli.job("sft", tiny_config(tmp_path / "sft", **{"sft.lr": 1e30})),
        cli.job("reward", tiny_config(tmp_path / "reward", **model, **{"reward.lr": 1e30})),
        cli.job("ppo", tiny_config(tmp_path / "ppo", **function, **{"ppo.lr": 1e30}), cwd=str(bench)),
        cli.job("ppo", tiny_config(tmp_path / "ppo1", **function, **wild), cwd=str(bench)),
        cli.job("sft", tiny_config(tmp_path / "gradient"), patch="nan_gradient"),
        cli.job("sft", tiny_config(tmp_path / "last", **{"sft.batch_size": 18}), patch="nan_gradient"),
    ]
    sft, reward, ppo, ppo1, gradient, last = done = cli.many(jobs)
    for one in done:
        assert one.rc == 2, one.err
        assert "lower the learning rate" in one.sentence()
    assert "sft: train/sft/loss is nan at step 2" in sft.sentence()
    assert "checkpoints/sft/step_00000001;" in sft.sentence() and checkpoints(tmp_path / "sft", "sft") == [
        "step_00000001"
    ]
    assert "reward: train/rm/loss is nan at step 2" in reward.sentence()
    assert "at step 1; there is no checkpoint yet" in ppo.sentence() and not checkpoints(tmp_path / "ppo", "ppo")
    assert "of update 2; the last good checkpoint is" in ppo1.sentence()
    assert "is not finite after step 2" in gradient.sentence()
    assert checkpoints(tmp_path / "gradient", "sft") == ["step_00000001"]
    assert "is not finite after step 2" in last.sentence() and not (tmp_path / "last/sft/model").exists()


def test_a_full_disk_by_a_fault(cli, tiny_config, tmp_path):
    folder = tmp_path / "run"
    cfg = tiny_config(folder, **{"checkpoint.every": 1})
    assert cli("sft", cfg, kill=dict(where="log", signal_number=9, stage="sft", step=3)).rc == -9
    done = cli("sft", cfg, "--resume", patch="full_disk")
    assert done.rc == 2 and "no disk space left while writing" in done.sentence()
    assert checkpoints(folder, "sft") == ["step_00000001", "step_00000002"]
    assert not list(folder.rglob(".tmp-*"))


@pytest.fixture
def tiny_disks(tmp_path):
    """Real file systems of a few kB, where mounting is permitted."""
    disks = []
    for kb in (4, 16, 48, 64, 128, 256, 448, 640):
        disk = tmp_path / f"{kb}k"
        disk.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={kb}k", "tmpfs", str(disk)]
        if not shutil.which("mount") or subprocess.run(command, capture_output=True).returncode:
            break
        disks.append(disk)
    yield disks
    for disk in disks:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_for_real(cli, tiny_config, tiny_disks):
    if not tiny_disks:
        pytest.skip("mounting a tmpfs is not permitted here")
    for disk, done in zip(
        tiny_disks, cli.many([cli.job("run", tiny_config(d / "run")) for d in tiny_disks]), strict=True
    ):
        assert done.rc == 2, (disk, done.err)
        assert "no disk space left while writing" in done.sentence(), (disk, done.err)
        print(disk.name, done.sentence())
