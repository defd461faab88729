"""Seconds per PPO update of TRL's PPOTrainer on the case that a JSON file describes. Runs in TRL's own environment.

Usage: python trl_ppo.py CASE.json  -> one JSON line with the seconds of each update.
"""

import itertools
import json
import resource
import sys
import tempfile
import time
from pathlib import Path

import torch
from datasets import Dataset
from transformers import (
    AutoTokenizer,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GPTNeoXForSequenceClassification,
    TrainerCallback,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer

case = json.loads(Path(sys.argv[1]).read_text())
torch.set_num_threads(case["threads"])
torch.manual_seed(1)
tokenizer = AutoTokenizer.from_pretrained(case["tokenizer"], padding_side="left")
tokenizer.add_special_tokens({"pad_token": "[PAD]"})
config = GPTNeoXConfig(**case["model"])
policy, ref = GPTNeoXForCausalLM(config), GPTNeoXForCausalLM(config)
ref.load_state_dict(policy.state_dict())
config_scalar = GPTNeoXConfig(**case["model"], num_labels=1, pad_token_id=tokenizer.pad_token_id)
reward, value = GPTNeoXForSequenceClassification(config_scalar), GPTNeoXForSequenceClassification(config_scalar)
rows = len(case["queries"])
stamps = []


class Clock(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        stamps.append(time.perf_counter())

    def on_step_end(self, args, state, control, **kwargs):
        stamps.append(time.perf_counter())


with tempfile.TemporaryDirectory() as folder:
    args = PPOConfig(
        output_dir=folder,
        per_device_train_batch_size=case["micro_batch"],
        gradient_accumulation_steps=rows // case["micro_batch"],
        num_mini_batches=1,
        local_rollout_forward_batch_size=rows,
        total_episodes=rows * case["updates"],
        num_ppo_epochs=case["epochs"],
        response_length=case["response_length"],
        temperature=case["temperature"],
        num_sample_generations=0,
        learning_rate=3e-6,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=10_000,
        disable_tqdm=True,
    )
    trainer = PPOTrainer(
        args=args,
        processing_class=tokenizer,
        model=policy,
        ref_model=ref,
        reward_model=reward,
        value_model=value,
        train_dataset=Dataset.from_dict({"input_ids": case["queries"]}),
        eval_dataset=Dataset.from_dict({"input_ids": case["queries"][:2]}),
        callbacks=[Clock()],
    )
    trainer.train()
seconds = [b - a for a, b in itertools.pairwise(stamps)]
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"seconds": seconds, "peak_bytes": peak, "torch": torch.__version__}))
