"""Checkpoints: bitwise round trips, damage, strictness, pruning."""

import os
import random

import numpy as np
import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from fastrlhf.checkpoint import StopSignal, latest_checkpoint, load_checkpoint, named_generator, save_checkpoint
from fastrlhf.errors import UserError
from fastrlhf.optimizer import adamw


def model(*, tied=False, seed=0, hidden=16, layers=1):
    torch.manual_seed(seed)
    config = GPTNeoXConfig(
        vocab_size=50,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=32,
        tie_word_embeddings=tied,
    )
    return GPTNeoXForCausalLM(config)


def optimizer_of(net):
    return adamw(net, lr=1e-2, eps=1e-5, weight_decay=0.01)


def train(net, optimizer, generator, steps):
    for _ in range(steps):
        # Data from the named stream, noise from the three global ones.
        ids = torch.randint(50, (2, 8), generator=generator)
        noise = float(torch.rand(())) + random.random() + float(np.random.rand())
        (net(input_ids=ids, labels=ids).loss * noise).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def save(folder, step, net, optimizer, generator, keep=2, **state):
    return save_checkpoint(
        folder, step, modules={"m": net}, optimizer=optimizer, generators={"g": generator}, state=state, keep=keep
    )


def load(path, net, optimizer, generator):
    return load_checkpoint(path, modules={"m": net}, optimizer=optimizer, generators={"g": generator})


def seed_everything(seed):
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_training_goes_on_bit_for_bit(tmp_path, tied, dtype):
    net, generator = model(tied=tied).to(dtype), named_generator(1, "data")
    optimizer = optimizer_of(net)
    seed_everything(3)
    train(net, optimizer, generator, 3)
    path = save(tmp_path, 3, net, optimizer, generator, order=[2, 0, 1], loss=0.1)
    train(net, optimizer, generator, 3)

    again, other_generator = model(tied=tied, seed=9).to(dtype), named_generator(8, "else")
    other = optimizer_of(again)
    seed_everything(99)
    train(again, other, other_generator, 1)
    assert load(path, again, other, other_generator) == {"order": [2, 0, 1], "loss": 0.1}
    if tied:
        assert again.get_output_embeddings().weight is again.get_input_embeddings().weight
    train(again, other, other_generator, 3)
    for (name, a), b in zip(net.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b), name
    slots, others = optimizer.state_dict()["state"], other.state_dict()["state"]
    assert slots.keys() == others.keys() and len(slots) == len(list(net.parameters()))
    for i in slots:
        a, b = slots[i], others[i]
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    assert optimizer.param_groups[0]["betas"] == other.param_groups[0]["betas"]
    assert torch.equal(generator.get_state(), other_generator.get_state())


def test_every_random_stream_comes_back(tmp_path):
    net, generator = model(), named_generator(1, "data")
    optimizer = optimizer_of(net)
    seed_everything(5)
    np.random.randn()  # leaves a cached second normal
    random.gauss(0, 1)

    def draw():
        return (
            torch.rand(3).tolist(),
            torch.rand(3, generator=generator).tolist(),
            [np.random.randn() for _ in range(3)],
            [random.gauss(0, 1) for _ in range(3)],
        )

    path = save(tmp_path, 1, net, optimizer, generator)
    expected = draw()
    draw()
    load(path, net, optimizer, generator)
    assert draw() == expected


def test_named_generators_are_independent_and_reproducible():
    def draw(*args):
        return torch.rand(4, generator=named_generator(*args)).tolist()

    assert draw(1, "a") == draw(1, "a")
    assert len({tuple(draw(*args)) for args in ((1, "a"), (1, "b"), (2, "a"), (11, "a"))}) == 4


@pytest.fixture
def saved(tmp_path):
    net, generator = model(), named_generator(1, "data")
    optimizer = optimizer_of(net)
    train(net, optimizer, generator, 1)
    return save(tmp_path / "c", 1, net, optimizer, generator), (net, optimizer, generator)


@pytest.mark.parametrize(
    "name", ["m.safetensors", "optimizer.safetensors", "random.safetensors", "state.json", "manifest.json"]
)
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_file_is_named(saved, name, damage):
    path, parts = saved
    file = path / name
    raw = bytearray(file.read_bytes())
    if damage == "flip":
        raw[len(raw) // 2] ^= 0x80  # in JSON: no UTF-8 any more
        file.write_bytes(raw)
    elif damage == "cut":
        file.write_bytes(raw[:-1])
    else:
        file.unlink()
    with pytest.raises(UserError) as caught:
        load(path, *parts)
    assert name in str(caught.value) and str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "shape, words", [(dict(layers=2), "missing"), (dict(hidden=32), "another shape"), (dict(tied=True), "unexpected")]
)
def test_a_checkpoint_of_another_model_is_refused(saved, shape, words):
    path, (_, _, generator) = saved
    net = model(**shape)
    with pytest.raises(UserError, match=words):
        load(path, net, optimizer_of(net), generator)


def test_unexpected_tensors_and_missing_buffers_are_refused(tmp_path):
    class Net(torch.nn.Linear):
        pass

    net, generator = Net(2, 2), named_generator(1, "x")
    net.register_buffer("more", torch.ones(1))
    path = save(tmp_path / "more", 1, net, optimizer_of(net), generator)
    plain = Net(2, 2)
    with pytest.raises(UserError, match="unexpected.*more"):
        load(path, plain, optimizer_of(plain), generator)
    path = save(tmp_path / "less", 1, plain, optimizer_of(plain), generator)
    with pytest.raises(UserError, match="missing.*more"):
        load(path, net, optimizer_of(net), generator)
    with pytest.raises(UserError, match="random stream 'other'"):
        load_checkpoint(path, modules={"m": plain}, optimizer=optimizer_of(plain), generators={"other": generator})


def test_older_checkpoints_go_only_when_the_new_one_stands(tmp_path, monkeypatch):
    net, generator = model(), named_generator(1, "data")
    optimizer = optimizer_of(net)

    def names():
        return sorted(p.name for p in tmp_path.iterdir())

    for step in (1, 2, 3):
        save(tmp_path, step, net, optimizer, generator, keep=2)
    assert names() == ["step_00000002", "step_00000003"]
    rename = os.rename

    def fails(src, dst):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "rename", fails)
    with pytest.raises(UserError, match="no disk space"):
        save(tmp_path, 4, net, optimizer, generator, keep=1)
    assert {"step_00000002", "step_00000003"} <= set(names())

    def looks(src, dst):
        assert {"step_00000002", "step_00000003"} <= set(names())
        rename(src, dst)
        assert {"step_00000002", "step_00000003", "step_00000004"} <= set(names())

    monkeypatch.setattr(os, "rename", looks)
    save(tmp_path, 4, net, optimizer, generator, keep=1)
    assert names() == ["step_00000004"]


def test_a_half_written_checkpoint_is_neither_loaded_nor_in_the_way(tmp_path):
    net, generator = model(), named_generator(1, "data")
    optimizer = optimizer_of(net)
    assert latest_checkpoint(tmp_path / "nowhere") is None
    first = save(tmp_path, 1, net, optimizer, generator)
    left = tmp_path / ".tmp-step_00000002"
    left.mkdir()
    (left / "m.safetensors").write_bytes(b"half")
    (left / "stray").write_bytes(b"")
    assert latest_checkpoint(tmp_path) == first
    second = save(tmp_path, 2, net, optimizer, generator)
    assert latest_checkpoint(tmp_path) == second and not left.exists()
    assert "stray" not in {p.name for p in second.iterdir()}
    load(second, net, optimizer, generator)


@pytest.mark.parametrize("text", ["{}", "[]", "[1]", '{"m.safetensors": 3}', '{"m.safetensors": ["a", "b"]}', "\xff"])
def test_a_damaged_manifest_is_a_sentence(tmp_path, text):
    net, generator = model(), torch.Generator()
    optimizer = optimizer_of(net)
    path = save(tmp_path, 1, net, optimizer, generator)
    (path / "manifest.json").write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match=r"is damaged \(manifest.json\)"):
        load(path, net, optimizer, generator)


def test_a_copy_beside_the_checkpoints_is_not_one(tmp_path):
    net, generator = model(), torch.Generator()
    path = save(tmp_path, 1, net, optimizer_of(net), generator)
    for name in ("step_00000001.bak", "step_x", "step_", "step_-0000002"):
        (tmp_path / name).mkdir()
    assert latest_checkpoint(tmp_path) == path


def test_the_same_step_again_replaces_the_checkpoint(tmp_path):
    net, generator = model(), named_generator(1, "data")
    optimizer = optimizer_of(net)
    save(tmp_path, 1, net, optimizer, generator, n=1)
    path = save(tmp_path, 1, net, optimizer, generator, n=2)
    assert load(path, net, optimizer, generator) == {"n": 2}
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"]


def test_no_checkpoint_file_is_a_pickle(saved):
    path, _ = saved
    assert {p.suffix for p in path.iterdir()} == {".safetensors", ".json"}


def test_an_empty_tensor_is_refused_before_anything_is_written(tmp_path):
    net = torch.nn.Linear(2, 2)
    net.register_buffer("shard", torch.empty(0))
    with pytest.raises(ValueError, match="shard"):
        save(tmp_path, 1, net, optimizer_of(net), named_generator(1, "x"))
    assert not list(tmp_path.iterdir())


def test_a_signal_raises_a_flag_and_a_second_one_acts():
    import signal

    # What stood there before may be SIG_IGN: a shell starts its background jobs so.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with StopSignal() as stop:
            assert not stop.requested
            signal.raise_signal(signal.SIGINT)
            assert stop.requested
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
