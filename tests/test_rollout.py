"""The decode loop against transformers' `generate`, and the draws against the distribution they come from."""

import numpy as np
import pytest
import torch
import transformers
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from fastrlhf.models import hidden_states, packed_logprobs
from fastrlhf.rollout import generate
from fastrlhf.rollout.decode import NotFiniteError
from fastrlhf.rollout.sampling import sample_rows

V, EOS, PAD = 96, 0, 95
SMALL = dict(
    vocab_size=V,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    initializer_range=0.4,
)
GPT2 = dict(vocab_size=V, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3, bos_token_id=EOS, eos_token_id=EOS)
FAMILIES = {
    "neox parallel": ("GPTNeoX", SMALL | dict(use_parallel_residual=True, rotary_pct=0.25)),
    "neox serial": ("GPTNeoX", SMALL | dict(use_parallel_residual=False, rotary_pct=1.0)),
    "llama": ("Llama", SMALL | dict(num_key_value_heads=4)),
    "llama GQA": ("Llama", SMALL | dict(num_key_value_heads=2, tie_word_embeddings=True)),
    "qwen2": ("Qwen2", SMALL | dict(num_key_value_heads=2)),
    "mistral, sliding window": ("Mistral", SMALL | dict(num_key_value_heads=2, sliding_window=8)),
    "gemma2, softcap": (
        "Gemma2",
        SMALL | dict(num_key_value_heads=2, head_dim=8, sliding_window=8, final_logit_softcapping=5.0),
    ),
    "gpt2": ("GPT2", GPT2),
    "opt": (
        "OPT",
        dict(
            vocab_size=V, hidden_size=32, word_embed_proj_dim=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=64
        )
        | dict(init_std=0.3),
    ),
}


def build(family):
    name, settings = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**settings)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def queries_of(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(1, PAD, n) for n in lengths]


def draw(model, queries, seed=1, **changed):
    settings = dict(response_length=24, temperature=0.9, eos_id=EOS, pad_id=PAD, rows_per_batch=3)
    return generate(model, queries, generator=torch.Generator().manual_seed(seed), **(settings | changed))


LENGTHS = [5, 1, 13, 7, 2, 13, 30]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_decoding_is_transformers(family):
    model = build(family)
    queries = queries_of(LENGTHS)
    # An EOS that greedy decoding does reach, so that rows end at different slots.
    first = draw(model, queries, greedy=True, eos_id=EOS).responses_BT
    eos = int(first[2, 5])
    ours = draw(model, queries, greedy=True, eos_id=eos)
    theirs = draw(model, queries, greedy=True, eos_id=eos, engine="hf")
    assert ours.has_eos_B.any() and len(set(ours.lengths_B.tolist())) > 1
    for name in ("responses_BT", "lengths_B", "has_eos_B"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


@pytest.mark.parametrize("engine", ["native", "hf"])
@pytest.mark.parametrize("family", ["neox parallel", "gemma2, softcap", "llama GQA"])
def test_recorded_logprobs_are_those_of_a_forward_pass(family, engine):
    model = build(family)
    queries = queries_of(LENGTHS)
    got = draw(model, queries, engine=engine)
    for b, query in enumerate(queries):
        n = int(got.lengths_B[b])
        kept = got.responses_BT[b, :n]
        ids = torch.cat([torch.from_numpy(query), kept])[None]
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, len(query) - 1 : -1].float() / (0.9 + 1e-7)
            logits[:, PAD] = -torch.inf  # what the draw was made from
            want = torch.log_softmax(logits, -1).gather(1, kept[:, None])[:, 0]
        torch.testing.assert_close(got.logprobs_BT[b, :n], want, rtol=0, atol=2e-4)
        assert (got.logprobs_BT[b, n:] == 0).all() and (got.responses_BT[b, n:] == EOS).all()
        assert bool(got.has_eos_B[b]) == bool((kept == EOS).any()) == (int(kept[-1]) == EOS)
        assert not (kept == PAD).any()


def test_a_draw_does_not_depend_on_the_batch():
    model = build("neox parallel")
    queries = queries_of(LENGTHS)
    want = draw(model, queries, rows_per_batch=1)
    for size in (2, 3, 64):
        got = draw(model, queries, rows_per_batch=size)
        assert torch.equal(got.responses_BT, want.responses_BT), size
    assert not torch.equal(draw(model, queries, seed=2).responses_BT, want.responses_BT)


@pytest.mark.parametrize("engine", ["native", "hf"])
def test_the_first_token_follows_the_distribution(engine):
    model, n = build("neox serial"), 4000
    query = queries_of([6])[0]
    got = draw(model, [query] * n, response_length=1, rows_per_batch=n, engine=engine).responses_BT[:, 0]
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(query)[None]).logits[0, -1] / 0.9
    logits[PAD] = -torch.inf
    p = torch.softmax(logits.double(), -1)
    counts = torch.bincount(got, minlength=V).double()
    often = p * n >= 5
    rest = torch.stack([counts[~often].sum(), (p * n)[~often].sum()])
    observed, expected = (torch.cat([x[often], r[None]]) for x, r in zip((counts, p * n), rest, strict=True))
    chi2 = ((observed - expected).square() / expected).sum()
    degrees = len(observed) - 1
    assert degrees > 10
    assert chi2 < degrees + 5 * (2 * degrees) ** 0.5  # mean + 5 standard deviations of the chi-squared law


def test_the_model_is_left_as_it_was():
    model = build("neox parallel").train()
    state = torch.get_rng_state()
    for engine in ("native", "hf"):
        draw(model, queries_of([3]), engine=engine)
        assert model.training and torch.equal(torch.get_rng_state(), state)
    with torch.no_grad():
        model.get_output_embeddings().weight.fill_(float("nan"))
    with pytest.raises(NotFiniteError, match="row 0"):
        draw(model, queries_of([3]))
    assert model.training


@pytest.mark.parametrize("engine", ["native", "hf"])
def test_what_the_models_folder_says_of_generation_does_not_count(engine):
    model = build("neox serial")
    want = draw(model, queries_of(LENGTHS), engine=engine)
    model.generation_config = transformers.GenerationConfig(
        suppress_tokens=list(range(1, 60)), repetition_penalty=9.0, min_new_tokens=20, top_k=3, do_sample=True
    )
    got = draw(model, queries_of(LENGTHS), engine=engine)
    assert torch.equal(got.responses_BT, want.responses_BT) and torch.equal(got.logprobs_BT, want.logprobs_BT)
    assert model.generation_config.repetition_penalty == 9.0


def test_bad_arguments():
    model = build("neox parallel")
    with pytest.raises(ValueError, match="query 1 is empty"):
        draw(model, [np.array([1]), np.array([], dtype=np.int64)])
    with pytest.raises(ValueError, match="response_length"):
        draw(model, queries_of([2]), response_length=0)
    assert draw(model, []).responses_BT.shape == (0, 24)


def test_decoding_stops_when_every_row_has_ended():
    torch.manual_seed(0)
    model = GPTNeoXForCausalLM(GPTNeoXConfig(**SMALL)).eval()
    calls = []
    model.base_model.register_forward_hook(lambda *_: calls.append(1))
    queries = queries_of([4, 9])
    first = draw(model, queries, greedy=True, response_length=1).responses_BT
    eos = int(first[0, 0])
    calls.clear()
    got = draw(model, [queries[0]] * 2, greedy=True, eos_id=eos)
    assert len(calls) == 1 and got.lengths_B.tolist() == [1, 1]


@pytest.mark.parametrize("V", [1, 2, 255, 256, 257, 1000])
def test_inverse_cdf(V):
    gen = torch.Generator().manual_seed(V)
    logits = torch.randn(64, V, generator=gen) * 3
    logits[:, ::3] = -torch.inf
    logits[:, V - 1] = 0.0
    uniform = torch.rand(64, generator=gen)
    uniform[:3] = torch.tensor([0.0, 1 - 2**-24, 0.5])
    p = torch.softmax(logits.double(), -1)
    tokens, logprobs, ok = sample_rows(logits.clone(), uniform)
    assert ok.all()
    torch.testing.assert_close(logprobs.double(), p.gather(1, tokens[:, None])[:, 0].log(), rtol=0, atol=1e-5)
    after = p.cumsum(-1).gather(1, tokens[:, None])[:, 0]
    before = after - p.gather(1, tokens[:, None])[:, 0]
    assert (p.gather(1, tokens[:, None]) > 0).all()
    assert ((before <= uniform + 1e-6) & (uniform - 1e-6 <= after)).all()


def test_a_draw_of_zero_skips_what_has_no_probability():
    logits = torch.zeros(2, 1000)
    logits[0, :300] = -torch.inf  # the whole first block, and the beginning of the second
    logits[1, :3] = -torch.inf
    assert sample_rows(logits, torch.zeros(2))[0].tolist() == [300, 3]


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("uniform", [None, torch.full((3,), 0.3)])
def test_unusable_rows_are_told(poison, uniform):
    logits = torch.zeros(3, 300)
    logits[1, 299] = poison
    tokens, _, ok = sample_rows(logits, uniform)
    assert ok.tolist() == [True, False, True] and ((tokens >= 0) & (tokens < 300)).all()


def test_packed_logprobs_agree_with_the_models_logits():
    for family in FAMILIES:
        model = build(family)
        ids = torch.from_numpy(np.stack(queries_of([9, 9])))
        with torch.no_grad():
            want = torch.log_softmax(model(input_ids=ids).logits[:, :-1].float() / 0.7, -1)
            want = want.gather(2, ids[:, 1:, None])[..., 0].flatten()
            positions = torch.tensor([b * 9 + t for b in range(2) for t in range(8)])
            got = packed_logprobs(
                model, hidden_states(model.base_model, ids), positions, ids[:, 1:].flatten(), temperature=0.7
            )
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4, msg=lambda m, family=family: f"{family}: {m}")
