"""Small real training jobs on data that ships with their packages."""

from thalweg.workloads.job import (
    Batch,
    Job,
    JobKind,
    accuracy,
    cross_entropies,
    describe,
    evaluating,
    mean_loss,
    seeded,
)
from thalweg.workloads.lookup import all_jobs, find_job, parse_job, read_job

__all__ = [
    "Batch",
    "Job",
    "JobKind",
    "accuracy",
    "all_jobs",
    "cross_entropies",
    "describe",
    "evaluating",
    "find_job",
    "mean_loss",
    "parse_job",
    "read_job",
    "seeded",
]
