"""Prediction of the step time on a cluster that needn't exist: nothing is run.

python examples/predict.py
"""

import thalweg
from thalweg.predict.assumptions import assumed_machine, workload_of

situation = thalweg.Situation(
    cluster=thalweg.Cluster.regular([2, 2], nic="10gbit", uplink="1gbit"),
    workload=workload_of("resnet50", gpu="v100", batch=32),
    machine=assumed_machine(),
)

for sync in ("ddp", "hierarchical", "hierarchical+powersgd(rank=4)"):
    step = thalweg.predict(sync, situation)
    print(f"{sync}: {step.seconds:.3f} s per step ({step.low:.3f} to {step.high:.3f})")

print(thalweg.advise(situation).verdict)
