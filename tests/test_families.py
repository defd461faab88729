"""Model families: what is promised of each that is let in, and a sentence for each that is not."""

import copy

import numpy as np
import pytest
import torch

from fastrlhf.config import ModelConfig
from fastrlhf.errors import UserError
from fastrlhf.models import (
    check_head,
    hidden_states,
    load_policy,
    load_scalar_model,
    policy_from_config,
    scalar_from_policy,
)
from fastrlhf.rollout import check_generate, generate

V, EOS, PAD = 90, 1, 0
BASE = dict(num_hidden_layers=2, num_attention_heads=4, hidden_size=32, max_position_embeddings=64)
LLAMA = BASE | dict(intermediate_size=64, num_key_value_heads=2)
N_STYLE = dict(n_embd=32, n_layer=2, n_head=4, n_positions=64)
OPT = BASE | dict(model_type="opt", ffn_dim=64, word_embed_proj_dim=32, layerdrop=0.5)
DROP = dict(attention_dropout=0.5, hidden_dropout=0.5)
GPT_NEO = dict(
    model_type="gpt_neo",
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    attention_types=[[["global", "local"], 1]],
    max_position_embeddings=64,
    window_size=8,
)
ALLOWED = {
    "gpt_neox": BASE | DROP | dict(model_type="gpt_neox", intermediate_size=64),
    "llama": LLAMA | dict(model_type="llama", attention_dropout=0.5),
    "mistral": LLAMA | dict(model_type="mistral", attention_dropout=0.5, sliding_window=8),
    "qwen3": LLAMA | dict(model_type="qwen3", head_dim=8, attention_dropout=0.5),
    "gemma2": LLAMA | dict(model_type="gemma2", head_dim=8, sliding_window=8, attention_dropout=0.5),
    "gpt_oss, no sdpa": LLAMA | dict(model_type="gpt_oss", head_dim=8, num_local_experts=4, attention_dropout=0.5),
    "gpt2": N_STYLE | dict(model_type="gpt2", embd_pdrop=0.5, attn_pdrop=0.5, resid_pdrop=0.5),
    "gpt_bigcode": N_STYLE | dict(model_type="gpt_bigcode", attn_pdrop=0.5, resid_pdrop=0.5),
    "falcon": DROP | dict(model_type="falcon", hidden_size=32, num_hidden_layers=2, num_attention_heads=4),
    "opt": OPT | dict(dropout=0.5, attention_dropout=0.5),
    "opt, narrow embedding": OPT | dict(dropout=0.5, word_embed_proj_dim=16, do_layer_norm_before=False),
    "biogpt": BASE | dict(model_type="biogpt", intermediate_size=64, hidden_dropout_prob=0.5, layerdrop=0.5),
    "mixtral": LLAMA | dict(model_type="mixtral", num_local_experts=4, attention_dropout=0.5),
}
# A cache or a mask of its own: through transformers' generate only.
ONLY_HF = {
    "bloom": dict(model_type="bloom", hidden_size=32, n_layer=2, n_head=4, hidden_dropout=0.5),
    "gpt_neo": GPT_NEO | dict(resid_dropout=0.5, embed_dropout=0.5, attention_dropout=0.5),
    "mamba": dict(model_type="mamba", hidden_size=32, num_hidden_layers=2, state_size=8),
}
REFUSED = {
    "logits scaled after the projection": (
        LLAMA | dict(model_type="cohere", logit_scale=0.1),
        "more to its logits than project",
    ),
    "a head of two layers": (
        BASE | dict(model_type="bert", intermediate_size=64, is_decoder=True),
        "more to its logits",
    ),
    "attention in both directions": (
        dict(model_type="xlnet", d_model=32, n_layer=2, n_head=4, d_inner=64),
        "lets tokens see those after them",
    ),
    "a forward pass that fails": (
        LLAMA | dict(model_type="qwen3_moe", head_dim=8, num_experts=2, num_experts_per_tok=4),
        "cannot be trained here: ",
    ),
}


def build(shape):
    model = policy_from_config(shape, vocab_size=V, eos_id=EOS, dtype="float32", attn="auto", seed=1)
    with torch.no_grad():  # away from uniform, where every error hides
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model


IDS_BL = torch.arange(2, 26).view(2, 12)


@pytest.mark.parametrize("name", [*ALLOWED, *ONLY_HF])
def test_training_mode_computes_what_evaluation_mode_does(name):
    model = build((ALLOWED | ONLY_HF)[name])
    check_head(model)
    scalar = scalar_from_policy(model, generator=torch.Generator().manual_seed(0))
    for one, forward in {
        model: lambda: hidden_states(model.base_model, IDS_BL),
        scalar: lambda: scalar(IDS_BL),
    }.items():
        with torch.no_grad():
            one.eval()
            want = forward()
            one.train()
            assert torch.equal(forward(), want), type(one).__name__
    assert all(getattr(module, "p", 0) == 0 for module in model.modules())


@pytest.mark.parametrize("name", [*ALLOWED, *ONLY_HF])
def test_policy_and_scalar_model_come_back_from_disk_with_the_same_bits(name, tmp_path):
    model = build((ALLOWED | ONLY_HF)[name]).eval()
    scalar = scalar_from_policy(model, generator=torch.Generator().manual_seed(0)).eval()
    model.save_pretrained(tmp_path / "policy")
    scalar.save_pretrained(tmp_path / "scalar")
    policy_again = load_policy(str(tmp_path / "policy"), ModelConfig()).eval()
    scalar_again = load_scalar_model(str(tmp_path / "scalar"), ModelConfig()).eval()
    with torch.no_grad():
        assert torch.equal(scalar_again(IDS_BL), scalar(IDS_BL))
        assert torch.equal(hidden_states(policy_again.base_model, IDS_BL), hidden_states(model.base_model, IDS_BL))
    policy_again.train(), scalar_again.train()
    with torch.no_grad():
        assert torch.equal(scalar_again(IDS_BL), scalar(IDS_BL))


@pytest.mark.parametrize("engine", ["native", "hf"])
@pytest.mark.parametrize("name", [*ALLOWED, *ONLY_HF])
def test_what_is_let_in_samples_from_the_models_own_distribution(name, engine):
    model = build((ALLOWED | ONLY_HF)[name])
    if engine == "native" and name in ONLY_HF:
        with pytest.raises(UserError, match=r"rollout.engine: native cannot sample from \w+ \(.+\); set .*engine: hf"):
            check_generate(model, engine)
        return
    check_generate(model, engine)
    assert model.training
    rng = np.random.default_rng(0)
    queries = [rng.integers(2, V, n) for n in (5, 12, 1, 9, 12)]
    settings = dict(response_length=9, temperature=0.7, eos_id=EOS, pad_id=PAD)
    got = generate(model, queries, generator=torch.Generator().manual_seed(3), engine=engine, **settings)
    model.eval()
    for b, query in enumerate(queries):
        kept = got.responses_BT[b, : got.lengths_B[b]]
        with torch.no_grad():
            logits = model(input_ids=torch.cat([torch.from_numpy(query), kept])[None], use_cache=False).logits[0]
        logits = logits[len(query) - 1 : -1] / 0.7
        logits[:, PAD] = -torch.inf
        want = logits.log_softmax(-1).gather(1, kept[:, None])[:, 0]
        torch.testing.assert_close(got.logprobs_BT[b, : len(kept)], want, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_would_be_trained_wrongly_is_refused(name):
    shape, sentence = REFUSED[name]
    model = build(shape)
    with pytest.raises(UserError, match=sentence):
        check_head(model)
    assert model.training


def test_a_rate_that_is_left_is_found():
    model = build(ALLOWED["gpt2"])
    model.transformer.h[1].mlp.dropout.p = 0.5
    with pytest.raises(UserError, match="computes something else in training than in evaluation"):
        check_head(model)


def test_fields_that_a_family_reads_without_declaring_them_are_taken():
    shape = LLAMA | dict(model_type="qwen3_moe", head_dim=16, num_experts=4, num_experts_per_tok=2)
    assert build(shape).model.layers[0].self_attn.q_proj.weight.shape[0] == 4 * 16
    with pytest.raises(UserError, match="qwen3_moe has no field 'hidden_sizes'; did you mean hidden_size?"):
        build(shape | dict(hidden_sizes=4))


def test_a_family_without_generation_and_with_no_causal_model_is_named():
    shape = dict(model_type="t5", d_model=32, num_layers=2, num_heads=4, d_ff=64, d_kv=8)
    with pytest.raises(UserError, match="t5 is not a causal language model"):
        build(shape)
    rwkv = build(dict(model_type="rwkv", hidden_size=32, num_hidden_layers=2, context_length=64))
    for engine, advice in (("native", "set rollout.engine: hf"), ("hf", "this family is not supported")):
        with pytest.raises(UserError, match=advice):
            check_generate(rwkv, engine)


def test_a_reward_model_does_not_leave_the_attention_that_was_asked_for(tmp_path):
    policy = build(ALLOWED["gpt_oss, no sdpa"])
    scalar_from_policy(policy, generator=torch.Generator()).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="attn: GptOssModel .* does not support sdpa; use attn: auto"):
        load_scalar_model(str(tmp_path), ModelConfig(), attn="sdpa")
    loaded = load_scalar_model(str(tmp_path), ModelConfig(), attn="eager")
    assert loaded.lm_backbone.config._attn_implementation == "eager"


def test_a_copy_shares_no_weight():
    policy = build(ALLOWED["gpt_neox"])
    scalar = scalar_from_policy(policy, generator=torch.Generator())
    before = copy.deepcopy(policy.state_dict())
    with torch.no_grad():
        for parameter in scalar.parameters():
            parameter.zero_()
    assert all(torch.equal(value, before[key]) for key, value in policy.state_dict().items())
