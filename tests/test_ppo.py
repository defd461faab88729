"""The PPO step against a twin in fp64 that is written from the specification: one row, one slot at a time."""

import copy

import numpy as np
import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from fastrlhf.config import PPOConfig
from fastrlhf.episodes import Rollout
from fastrlhf.models import frozen_copy, scalar_from_policy
from fastrlhf.optimizer import adamw
from fastrlhf.ppo import PPOModels, Settings, make_experience, optimize, score
from fastrlhf.replay.ppo import rollout_from_tensors

PAD, EOS, T, V = 20, 0, 6, 20
# REFERENCE 2.2, and rows of ordinary lengths. PAD is 20: an id that the models do not embed.
SAMPLED = {
    "EOS at 2": [5, 6, EOS, 7, 8, 9],
    "EOS at 0": [EOS, 6, 7, 7, 8, 9],
    "EOS at 4": [5, 6, 7, 8, EOS, 9],
    "EOS at 5": [5, 6, 7, 8, 9, EOS],
    "no EOS": [5, 6, 7, 8, 9, 10],
    "PAD at 0": [PAD, 6, 7, 8, 9, 10],
    "PAD at 1, EOS at 2": [5, PAD, EOS, 7, 8, 9],
    "EOS twice": [5, EOS, EOS, EOS, 8, EOS],
}
# (last kept slot, has EOS, policy slots, value slots, slot of the score)
TABLE = {
    "EOS at 2": (2, True, 3, 4, 3),
    "EOS at 0": (0, True, 1, 2, 1),
    "EOS at 4": (4, True, 5, 6, 5),
    "EOS at 5": (5, True, 6, 6, 5),
    "no EOS": (5, False, 6, 6, 5),
    "PAD at 0": (-1, False, 0, 1, 0),
    "PAD at 1, EOS at 2": (0, True, 1, 2, 1),
    "EOS twice": (1, True, 2, 3, 2),
}
QUERY_LENGTHS = [7, 3, 5, 1, 7, 4, 6, 2]


@pytest.fixture
def models():
    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=V,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        initializer_range=0.3,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    policy = GPTNeoXForCausalLM(config).double().eval()
    ref = GPTNeoXForCausalLM(config).double()
    generator = torch.Generator().manual_seed(1)
    reward = scalar_from_policy(policy, generator=generator).eval()
    reward.config.bias = 0.3
    critic = copy.deepcopy(reward)
    return PPOModels(policy, frozen_copy(ref), critic, frozen_copy(reward))


def tensors():
    rng = np.random.default_rng(0)
    queries = torch.full((len(SAMPLED), max(QUERY_LENGTHS)), PAD)
    for row, n in enumerate(QUERY_LENGTHS):
        queries[row, -n:] = torch.from_numpy(rng.integers(1, V, n))
    return queries, torch.tensor(list(SAMPLED.values()))


def tight(rollout):
    """As the trainer lays rows out."""
    return Rollout(rollout.queries, rollout.responses, rollout.has_eos_B, rollout.response_length)


def settings(tokens=10_000, **changed):
    ppo = PPOConfig(**({"kl_coef": 0.1, "gamma": 0.97, "lam": 0.9, "epochs": 2, "lr": 1e-2} | changed))
    return Settings(ppo=ppo, temperature=0.7, tokens_per_micro_batch=tokens, tokens_per_forward=tokens)


# --- the twin


def twin_rows(models, queries, responses):
    """Per row: kept length, has EOS, and the four models at every slot of the raw response."""
    rows = []
    for query, response in zip(queries, responses, strict=True):
        query = query[query != PAD]
        eos = (response == EOS).nonzero().flatten()
        post = response.clone()
        if len(eos):
            post[int(eos[0]) + 1 :] = PAD
        pads = (post == PAD).nonzero().flatten()
        last = int(pads[0]) - 1 if len(pads) else T - 1
        rows.append((query, response, post, last, bool((post == EOS).any())))
    return rows


def twin_forward(policy, critic, query, response, last):
    """Log-probabilities at slots 0..last and values at slots 0..last+1."""
    ids = torch.cat([query, response])
    keep = ids[: len(query) + last + 1][None]
    logits = policy(input_ids=keep).logits[0]
    logp = torch.log_softmax(logits / 0.7, -1)
    lp = [logp[len(query) + t - 1, response[t]] for t in range(last + 1)]
    v = critic(keep)[0]
    values = [v[len(query) + t - 1] for t in range(min(last + 2, T))]
    return lp, values


@torch.no_grad()
def twin_experience(models, queries, responses, p):
    out = {k: [] for k in ("scores", "lp", "ref", "v", "rewards", "adv", "ret")}
    rows = twin_rows(models, queries, responses)
    for query, response, post, last, has_eos in rows:
        lp, v = twin_forward(models.policy, models.critic, query, response, last)
        ref, _ = twin_forward(models.ref_policy, models.critic, query, response, last)
        ids = torch.cat([query, post[: last + 1]])
        s = float(models.reward_model(ids[None])[0, -1])
        if not has_eos and p.missing_eos_score is not None:
            s = p.missing_eos_score
        out["scores"].append(s)
        rewards = [0.0] * T
        for t in range(last + 1):
            rewards[t] = -p.kl_coef * float(lp[t] - ref[t])
        rewards[last + 1 if last + 1 < T else last] += s
        for name, x in (("lp", lp), ("ref", ref), ("v", v)):
            out[name].append([float(e) for e in x])
        out["rewards"].append(rewards)
    if p.whiten_rewards:
        flat = [out["rewards"][b][t] for b, r in enumerate(rows) for t in range(min(r[3] + 2, T))]
        std = np.sqrt(np.var(flat) + 1e-8)
        for b, r in enumerate(rows):
            n = min(r[3] + 2, T)
            mean = np.mean(flat)
            out["rewards"][b] = [(x - mean) / std + mean if t < n else 0.0 for t, x in enumerate(out["rewards"][b])]
    for b, r in enumerate(rows):
        v = out["v"][b] + [0.0] * (T - len(out["v"][b]))
        carried, advantages = 0.0, [0.0] * T
        for t in reversed(range(T)):
            following = v[t + 1] if t + 1 < T else 0.0
            delta = out["rewards"][b][t] + p.gamma * following - v[t]
            carried = delta + p.gamma * p.lam * carried
            advantages[t] = carried
        out["ret"].append([a + x for a, x in zip(advantages, v, strict=True)][: min(r[3] + 2, T)])
        out["adv"].append(advantages[: r[3] + 1])
    flat = np.concatenate(out["adv"])
    mean, var = flat.mean(), flat.var()
    out["adv"] = [[(a - mean) / np.sqrt(var + 1e-8) for a in row] for row in out["adv"]]
    return rows, out


def twin_losses(models, rows, exp, members, p):
    """The two losses of some rows, and statistics, as lists of slots."""
    pg, vf, clipped, v_clipped, ratios, kl2 = [], [], [], [], [], []
    for b in members:
        query, response, _, last, _ = rows[b]
        lp, v = twin_forward(models.policy, models.critic, query, response, last)
        for t in range(last + 1):
            d = lp[t] - exp["lp"][b][t]
            ratio = torch.exp(d)
            a = exp["adv"][b][t]
            one, two = -a * ratio, -a * torch.clamp(ratio, 1 - p.clip, 1 + p.clip)
            pg.append(torch.max(one, two))
            clipped.append(float(two > one))
            ratios.append(ratio.item())
            kl2.append(d.item() ** 2 / 2)
        for t, x in enumerate(v):
            old, target = exp["v"][b][t], exp["ret"][b][t]
            one, two = (x - target) ** 2, (torch.clamp(x, old - p.value_clip, old + p.value_clip) - target) ** 2
            vf.append(torch.max(one, two) / 2)
            v_clipped.append(float(two > one))
    pg_loss = torch.stack(pg).mean() if pg else torch.zeros((), dtype=torch.float64)
    mean = {k: np.mean(x) if x else 0.0 for k, x in (("pg_clipfrac", clipped), ("ratio", ratios), ("approxkl", kl2))}
    return pg_loss, torch.stack(vf).mean(), {**mean, "vf_clipfrac": np.mean(v_clipped)}


def twin_optimize(models, rows, exp, orders, minibatch, micro, p):
    params = [*models.policy.parameters(), *models.critic.parameters()]
    optimizer = torch.optim.AdamW(params, lr=p.lr, eps=p.eps, weight_decay=p.weight_decay, foreach=False)
    seen = []
    for order in orders:
        for start in range(0, len(order), minibatch):
            group = order[start : start + minibatch]
            optimizer.zero_grad()
            for m in range(0, len(group), micro):
                pg, vf, stats = twin_losses(models, rows, exp, group[m : m + micro], p)
                ((pg + p.vf_coef * vf) * micro / len(group)).backward()
                seen.append({"pg_loss": pg.item(), "vf_loss": vf.item(), **stats})
            if p.max_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(params, p.max_grad_norm)
            optimizer.step()
    return {k: np.mean([s[k] for s in seen]) for k in seen[0]}


# --- tests


def test_the_table_of_edge_cases():
    rollout, _ = rollout_from_tensors(*tensors(), pad_id=PAD, eos_id=EOS, truncate_id=EOS)
    mask, value_mask = rollout.masks_BT()
    for b, (name, (last, has_eos, policy, value, _)) in enumerate(TABLE.items()):
        got = int(rollout.last_index_B()[b]), bool(rollout.has_eos_B[b]), int(mask[b].sum()), int(value_mask[b].sum())
        assert got == (last, has_eos, policy, value), name


@pytest.mark.parametrize("layout", ["tight", "recorded"])
@pytest.mark.parametrize("tokens", [10_000, 1])
@pytest.mark.parametrize("changed", [{}, {"whiten_rewards": True, "missing_eos_score": None}])
def test_experience(models, layout, tokens, changed):
    queries, responses = tensors()
    rollout, _ = rollout_from_tensors(queries, responses, pad_id=PAD, eos_id=EOS, truncate_id=EOS)
    rollout = tight(rollout) if layout == "tight" else rollout
    chosen = settings(tokens, **changed)
    got = make_experience(rollout, score(rollout, models, chosen), chosen)
    rows, want = twin_experience(models, queries, responses, chosen.ppo)
    # transformers computes rotary angles in fp32 whatever the weights are; they depend on the column of a row.
    atol = 1e-9 if layout == "tight" else 2e-6
    torch.testing.assert_close(got.scores_B, torch.tensor(want["scores"], dtype=torch.float64), rtol=0, atol=atol)
    for name, ours in (
        ("lp", got.logprobs_BT),
        ("ref", got.ref_logprobs_BT),
        ("v", got.values_BT),
        ("rewards", got.rewards_BT),
        ("adv", got.advantages_BT),
        ("ret", got.returns_BT),
    ):
        padded = torch.tensor([row + [0.0] * (T - len(row)) for row in want[name]], dtype=torch.float64)
        torch.testing.assert_close(ours, padded, rtol=0, atol=atol, msg=lambda m, name=name: f"{name}: {m}")
    for b, (name, row) in enumerate(TABLE.items()):
        shaped = got.rewards_BT[b] if not changed else None
        if shaped is not None:
            after = shaped + chosen.ppo.kl_coef * got.kl_BT[b]
            assert after.abs().argmax() == row[4], name
            torch.testing.assert_close(after[row[4]], got.scores_B[b])


@pytest.mark.parametrize("tokens", [10_000, 30, 1])
@pytest.mark.parametrize(
    ("reduction", "minibatch", "micro"),
    [("minibatch", 8, 8), ("minibatch", 4, 2), ("microbatch", 8, 8), ("microbatch", 4, 2), ("microbatch", 8, 1)],
)
def test_update(models, tokens, reduction, minibatch, micro):
    queries, responses = tensors()
    rollout, _ = rollout_from_tensors(queries, responses, pad_id=PAD, eos_id=EOS, truncate_id=EOS)
    chosen = settings(tokens, loss_reduction=reduction)
    twins = PPOModels(copy.deepcopy(models.policy), models.ref_policy, copy.deepcopy(models.critic), None)
    rows, want = twin_experience(models, queries, responses, chosen.ppo)
    orders = [torch.randperm(8, generator=torch.Generator().manual_seed(e)).tolist() for e in range(2)]
    wanted = twin_optimize(
        twins, rows, want, orders, minibatch, micro if reduction == "microbatch" else minibatch, chosen.ppo
    )

    rollout = tight(rollout)
    got = make_experience(rollout, score(rollout, models, chosen), chosen)
    optimizer = adamw(models.trained(), lr=chosen.ppo.lr, eps=chosen.ppo.eps, weight_decay=chosen.ppo.weight_decay)
    means = optimize(got, models, optimizer, orders, minibatch_size=minibatch, micro_batch_size=micro, settings=chosen)
    for name, value in wanted.items():
        assert float(means[name]) == pytest.approx(value, abs=1e-8), name
    assert means["ratio_max"] > 1.2 and means["pg_clipfrac"] > 0 and means["vf_clipfrac"] > 0  # the clips are at work
    for ours, theirs in ((models.policy, twins.policy), (models.critic, twins.critic)):
        for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-7, msg=lambda m, name=name: f"{name}: {m}")


def test_grad_norm_clipping_is_torchs(models):
    queries, responses = tensors()
    chosen = settings(max_grad_norm=0.05, epochs=1)
    twins = PPOModels(copy.deepcopy(models.policy), models.ref_policy, copy.deepcopy(models.critic), None)
    rows, want = twin_experience(models, queries, responses, chosen.ppo)
    twin_optimize(twins, rows, want, [list(range(8))], 8, 8, chosen.ppo)
    rollout = tight(rollout_from_tensors(queries, responses, pad_id=PAD, eos_id=EOS, truncate_id=EOS)[0])
    got = make_experience(rollout, score(rollout, models, chosen), chosen)
    optimizer = adamw(models.trained(), lr=chosen.ppo.lr, eps=chosen.ppo.eps, weight_decay=chosen.ppo.weight_decay)
    means = optimize(got, models, optimizer, [list(range(8))], minibatch_size=8, micro_batch_size=8, settings=chosen)
    assert means["grad_norm"] > 0.05
    for a, b in zip(models.policy.parameters(), twins.policy.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-7)


def test_recomputed_logprobs_start_at_ratio_one(models):
    rollout = tight(rollout_from_tensors(*tensors(), pad_id=PAD, eos_id=EOS, truncate_id=EOS)[0])
    chosen = settings(epochs=1)
    for module in (models.policy, models.ref_policy, models.critic, models.reward_model):
        module.float()
    got = make_experience(rollout, score(rollout, models, chosen), chosen)
    optimizer = adamw(models.trained(), lr=0.0, eps=1e-5, weight_decay=0.0)
    means = optimize(got, models, optimizer, [list(range(8))], minibatch_size=8, micro_batch_size=8, settings=chosen)
    assert means["ratio"] == 1 and means["ratio_max"] == 1 and means["approxkl"] == 0


def test_rows_without_a_kept_token_give_no_nan(models):
    """The reference divides 0 by 0 here."""
    queries, _ = tensors()
    responses = torch.full((8, T), PAD)
    rollout = tight(rollout_from_tensors(queries, responses, pad_id=PAD, eos_id=EOS, truncate_id=EOS)[0])
    chosen = settings(loss_reduction="microbatch")
    got = make_experience(rollout, score(rollout, models, chosen), chosen)
    assert got.advantages_BT.abs().max() == 0 and (got.scores_B == -1).all()
    optimizer = adamw(models.trained(), lr=1e-3, eps=1e-5, weight_decay=0.0)
    means = optimize(got, models, optimizer, [list(range(8))], minibatch_size=8, micro_batch_size=2, settings=chosen)
    assert all(bool(value.isfinite()) for value in means.values())
    assert all(bool(p.isfinite().all()) for p in models.trained().parameters())


def test_a_chunk_budget_changes_nothing_but_memory(models):
    rollout = tight(rollout_from_tensors(*tensors(), pad_id=PAD, eos_id=EOS, truncate_id=EOS)[0])
    assert [
        sorted(r for c in rollout.chunks(range(8), n, torch.device("cpu")) for r in c.rows) for n in (1, 20, 999)
    ] == [list(range(8))] * 3
    for chunk in rollout.chunks(range(8), 20, torch.device("cpu")):
        assert len(chunk.rows) == 1 or chunk.ids_bL.numel() <= 20
