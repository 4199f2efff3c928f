"""A training loop on two workers of Ray Train, over the backend thalweg.

python examples/trainers/with_ray.py
"""

import sys

import torch
from ray.train import ScalingConfig, get_context
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from torch import nn
from torch.nn.functional import cross_entropy

BACKEND = sys.argv[1] if len(sys.argv) > 1 else "thalweg"


def train():
    rank = get_context().get_world_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    model = prepare_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(20):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + rank))
        optimizer.zero_grad()
        cross_entropy(model(x), x[:, :4].argmax(1)).backward()
        optimizer.step()
    weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    print(f"rank {rank}: norm {weights.double().norm():.12f}", flush=True)


TorchTrainer(
    train, torch_config=TorchConfig(backend=BACKEND), scaling_config=ScalingConfig(num_workers=2)
).fit()
