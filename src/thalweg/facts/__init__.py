"""What is known: clusters, workloads, and the units they are written in."""

from thalweg.facts.cluster import Cluster, Duplex, Host, Lateness, Link, Rack, rack_sizes
from thalweg.facts.cluster_file import format_cluster, parse_cluster, read_cluster
from thalweg.facts.machine import CodecCost, Figure, Machine, Road
from thalweg.facts.models import MODELS, model_named
from thalweg.facts.units import Count, Duration, Rate, Size, about
from thalweg.facts.workload import Bucket, Costs, Tensor, Workload
from thalweg.facts.workload_file import format_workload, parse_workload, read_workload

__all__ = [
    "MODELS",
    "Bucket",
    "Cluster",
    "CodecCost",
    "Costs",
    "Count",
    "Duplex",
    "Duration",
    "Figure",
    "Host",
    "Lateness",
    "Link",
    "Machine",
    "Rack",
    "Rate",
    "Road",
    "Size",
    "Tensor",
    "Workload",
    "about",
    "format_cluster",
    "format_workload",
    "model_named",
    "parse_cluster",
    "parse_workload",
    "rack_sizes",
    "read_cluster",
    "read_workload",
]
