"""A small GPT-2 under the Trainer of transformers, over the backend thalweg.

torchrun --nproc-per-node 2 examples/trainers/with_transformers.py
"""

import sys
import tempfile

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

BACKEND = sys.argv[1] if len(sys.argv) > 1 else "thalweg"


class Texts(Dataset):
    def __init__(self):
        self.tokens = torch.randint(128, (64, 32), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


dist.init_process_group(BACKEND)  # before TrainingArguments, which refuse this name
arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    use_cpu=True,
    max_steps=10,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    seed=0,
)
torch.manual_seed(0)
config = GPT2Config(vocab_size=128, n_positions=32, n_embd=64, n_layer=2, n_head=4)
trainer = Trainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=Texts())
assert trainer.accelerator.num_processes == dist.get_world_size(), "replicas aren't synchronised"
trainer.train()

weights = torch.cat([p.detach().reshape(-1) for p in trainer.model.parameters()])
print(f"rank {dist.get_rank()}: norm {weights.double().norm():.12f}", flush=True)
dist.destroy_process_group()
