"""Seconds per PPO update of fastrlhf on the case that a JSON file describes, and by phase.

Usage: python fastrlhf_ppo.py CASE.json  -> one JSON line.
"""

import copy
import json
import resource
import sys
import time

import numpy as np
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from fastrlhf.config import Config
from fastrlhf.data.tokenize import load_tokenizer
from fastrlhf.evaluate.sampling import sample
from fastrlhf.loading import set_token_budgets
from fastrlhf.models import disable_dropout, frozen_copy, scalar_from_policy
from fastrlhf.ppo import PPOModels, make_experience, optimize, score
from fastrlhf.ppo_loop import ppo_settings
from fastrlhf.training import adamw

with open(sys.argv[1]) as file:
    case = json.load(file)
torch.set_num_threads(case["threads"])
torch.manual_seed(1)
tokenizer = load_tokenizer(case["tokenizer"])
policy = GPTNeoXForCausalLM(GPTNeoXConfig(**case["model"]))
disable_dropout(policy)
generator = torch.Generator().manual_seed(1)
reward = scalar_from_policy(policy, generator=generator)
critic = copy.deepcopy(reward)
models = PPOModels(policy, frozen_copy(policy), critic, reward.requires_grad_(False))
cfg = Config()
cfg.model.device = "cpu"
cfg.rollout.response_length, cfg.rollout.temperature = case["response_length"], case["temperature"]
cfg.ppo.epochs = case["epochs"]
set_token_budgets(cfg)
settings = ppo_settings(cfg)
optimizer = adamw(models.trained(), lr=3e-6, eps=1e-5, weight_decay=0.0)
queries = [np.array(q) for q in case["queries"]]
rows = len(queries)
seconds, phases = [], []
for _ in range(case["updates"]):
    t0 = time.perf_counter()
    got = sample(policy, tokenizer, queries, cfg, temperature=case["temperature"], generator=generator)
    t1 = time.perf_counter()
    experience = make_experience(got.rollout, score(got.rollout, models, settings), settings)
    t2 = time.perf_counter()
    orders = [torch.randperm(rows, generator=generator).tolist() for _ in range(case["epochs"])]
    optimize(experience, models, optimizer, orders, minibatch_size=rows, micro_batch_size=rows, settings=settings)
    t3 = time.perf_counter()
    seconds.append(t3 - t0)
    phases.append({"generate": t1 - t0, "score": t2 - t1, "update": t3 - t2})
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"seconds": seconds, "phases": phases, "peak_bytes": peak, "torch": torch.__version__}))
