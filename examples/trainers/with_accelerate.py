"""A loop of one's own with Accelerate, over the backend thalweg.

torchrun --nproc-per-node 2 examples/trainers/with_accelerate.py
"""

import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType, set_seed
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

BACKEND = sys.argv[1] if len(sys.argv) > 1 else "thalweg"

dist.init_process_group(BACKEND)  # before the Accelerator, which keeps the group that it finds
accelerator = Accelerator(cpu=True)  # without cpu=True it would train each replica alone
assert accelerator.distributed_type is not DistributedType.NO

set_seed(0)
x = torch.randn(320, 16)
data = TensorDataset(x, x[:, :4].argmax(1))
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=8))

for inputs, targets in loader:
    loss = cross_entropy(model(inputs), targets)
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()

weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
print(f"rank {accelerator.process_index}: norm {weights.double().norm():.12f}", flush=True)
dist.destroy_process_group()
