"""Figure 2 of CodedReduce: the time of an iteration with stragglers, under four schemes.

    umw   a master waits for every worker                 1/N of the data each
    gc    a master decodes from all but S                 as much more as the code needs
    rar   ring all-reduce, torch's own over Gloo          1/N each
    cr    CodedReduce on a tree                           as the tree's allocation says

The master, or the tree's root, is beside the workers. An iteration ends when the root has the
gradient (a worker, for the ring), and takes the time between two such ends: there is no barrier.
Stragglers are drawn for each worker and iteration from a seed, the same for every scheme. They are
of two kinds:

    held   the message is delayed; a worker whose iteration is over by then drops it
    away   the worker sleeps for the delay, and then continues with the current iteration; its
           communication thread forwards the messages of others all the while

Computation is a sleep in proportion to the worker's part of the data, so that a few cores can
simulate many workers. Every resulting gradient is compared with the true one.

This module has what follows without a run: who straggles when, which iterations exceed a scheme's
tolerance, and the time on the links. With t = M / rate for a message of M bytes, the busiest NIC
sends or receives in an iteration

    umw, gc   N t              the master's, a model to each worker
    rar       2 (N-1)/N t      everybody's
    cr        n t              every parent's, a model to each child

The problem is softmax regression, solved before the clock starts. An exact scheme goes through the
same models whichever workers straggle, so the models are known beforehand, and so is every message
that a worker will send. They are those of a few steps of gradient descent, used repeatedly.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from thalweg.catalog import parse_plan
from thalweg.codes import TREE_ROOT, Allocation, CodedTree
from thalweg.declarations import listed
from thalweg.errors import UsageError
from thalweg.facts import Cluster, Rate
from thalweg.redundancy import allocation_of
from thalweg.schedules import Group

Scheme = Literal["umw", "gc", "rar", "cr"]
DelayMode = Literal["held", "away"]
SCHEMES: tuple[Scheme, ...] = ("umw", "gc", "rar", "cr")
STUDY_TABLES = ("held", "delays", "compute", "pauses", "surface")
WARMUP_ITERATIONS = 5  # their time decides how many iterations follow
UNCOUNTED_ITERATIONS = WARMUP_ITERATIONS + 1  # and one in which all ranks learn that number
MAX_STUDY_WORKERS = 300
MAX_HELD_MESSAGE_BYTES = 1_500_000_000  # of one message of each worker, all held in memory
MAX_DELAY_SECONDS = 60.0  # of a straggler, and of computation
STUDY_RACK_COUNT = 4  # without a limit on their uplinks
SOFTMAX_SAMPLE_COUNT, SOFTMAX_FEATURE_COUNT = 6552, 5000  # as in the authors' program
MAX_MODEL_COUNT = 8
MAX_TOTAL_MESSAGE_BYTES = 512 << 20  # of all workers and models together
SOFTMAX_LEARNING_RATE = 1e-3  # per sample
SAMPLES_PER_FLOAT64_SUM = 512  # summed at once in double precision
Single = NDArray[np.float32]
Double = NDArray[np.float64]


def _refuse(*problems: tuple[bool, str, str]) -> None:
    """Raise a UsageError for the first of these conditions that holds, with its remedy."""
    for holds, problem, remedy in problems:
        if holds:
            raise UsageError(problem, remedy)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegularTree:
    """A tree whose parents have `fanout` children each and tolerate `stragglers` of them."""

    fanout: int
    layers: int
    stragglers: int

    def __post_init__(self) -> None:
        n, s = self.fanout, self.stragglers
        teams = [str(k - 1) for k in range(1, n + 1) if n % k == 0]
        _refuse(
            (
                n < 2 or self.layers < 1,
                f"a tree can't have {self.layers} layers of {n} children",
                "give at least 2x1: two children, one layer",
            ),
            (
                max(n, self.layers) > MAX_STUDY_WORKERS or self.workers > MAX_STUDY_WORKERS,
                f"a tree of {self.text} has too many workers for one machine",
                f"give one of at most {MAX_STUDY_WORKERS}, like 4x3 or 12x2",
            ),
            (
                s >= n,
                f"a parent of {n} children can't tolerate {s} stragglers among them",
                f"give --stragglers {n - 1} or less, or a wider tree",
            ),
            (
                n % (s + 1) > 0,
                f"{n} children can't be split into teams of {s + 1} that tolerate {s} stragglers",
                f"give --stragglers {listed(teams, 'or')}",
            ),
        )

    @classmethod
    def parse(cls, text: str, stragglers: int) -> Self:
        match = re.fullmatch(r"\s*(\d{1,6})x(\d{1,6})\s*", text)
        if match is None:
            raise UsageError(
                f"{text!r} is not a tree", "write it like 4x3: four children, three layers"
            )
        return cls(fanout=int(match[1]), layers=int(match[2]), stragglers=stragglers)

    @property
    def text(self) -> str:
        return f"{self.fanout}x{self.layers}"

    @property
    def workers(self) -> int:
        """The number of workers: n + n^2 + ... + n^L."""
        return sum(self.fanout**layer for layer in range(1, self.layers + 1))

    def more_redundant(self) -> RegularTree:
        """A tree of this shape that tolerates three stragglers per parent, or fewer if it must."""
        most = next((s for s in (3, 2, 1) if self.fanout % (s + 1) == 0), self.fanout - 1)
        return replace(self, stragglers=most)

    def cluster(self, nic: Rate) -> Cluster:
        """A cluster with a host for each worker and one for the root, which is rank 0."""
        hosts = self.workers + 1
        racks = min(STUDY_RACK_COUNT, hosts)
        sizes = [hosts // racks + (rack < hosts % racks) for rack in range(racks)]
        return Cluster.regular(sizes, nic=nic, uplink=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerTrial:
    """One scheme under one kind of straggler delay; workers are ranks from 1."""

    scheme: Scheme
    tree: RegularTree
    elements: int  # float32 values in a message
    late: float  # probability of a straggler
    delay: float  # seconds
    compute: float  # seconds, for all data
    iterations: int
    budget: float  # seconds; there are fewer iterations if they would take longer
    way: DelayMode = "held"
    seed: int = 0

    def __post_init__(self) -> None:
        nbytes, longest = 4 * self.elements, max(self.delay, self.compute)
        most = MAX_HELD_MESSAGE_BYTES // self.workers
        _refuse(
            (
                not 0 <= self.late <= 1,
                f"{self.late:g} is not a probability",
                "give one from 0 to 1",
            ),
            (
                self.elements < 2,
                f"a message of {nbytes} bytes is too short for two classes",
                "give at least 8B: a float32 for each",
            ),
            (
                nbytes > most,
                f"{self.workers} messages of {nbytes} bytes don't fit into memory",
                f"give messages of at most {most // 1_000_000}MB",
            ),
            (
                longest > MAX_DELAY_SECONDS,
                f"{longest:g} s is too long for one iteration",
                f"give a delay and a compute time of at most {MAX_DELAY_SECONDS:g}s",
            ),
        )

    @property
    def workers(self) -> int:
        return self.tree.workers

    @property
    def steps(self) -> int:
        """The maximum number of iterations, including those that aren't counted."""
        return UNCOUNTED_ITERATIONS + self.iterations

    @property
    def stragglers(self) -> int:
        """The number of stragglers that the scheme tolerates: per parent, or among all workers."""
        same_fraction = self.tree.stragglers * self.workers // self.tree.fanout
        return {"umw": 0, "gc": same_fraction, "rar": 0, "cr": self.tree.stragglers}[self.scheme]

    @property
    def sync(self) -> str:
        """The plan that allocates the data and, except for the ring, sums the gradients."""
        preset = f"codedreduce(fanout={self.tree.fanout}, " if self.scheme == "cr" else "gc("
        return f"{preset}stragglers={self.stragglers}, root=separate)"

    def allocation(self, cluster: Cluster) -> Allocation:
        return allocation_of(parse_plan(self.sync), Group.everybody(cluster))

    def lateness(self) -> NDArray[np.bool_]:
        """True for a straggler, by iteration and rank; the root and a delay of 0 have none.

        A longer trial begins like a shorter one.
        """
        draws = np.random.default_rng(self.seed).random((self.steps, self.workers + 1))
        straggles = draws < (self.late if self.delay else 0.0)
        straggles[:, 0] = False
        return straggles

    def beyond(self, allocation: Allocation, counted: int) -> int:
        """The number of counted iterations with more stragglers than the scheme tolerates."""
        late = self.lateness()[UNCOUNTED_ITERATIONS : UNCOUNTED_ITERATIONS + counted]
        return sum(not tolerates(allocation.tree, stragglers) for stragglers in late)

    def link_seconds(self, rate: Rate) -> float:
        """The time per iteration that the busiest NIC needs for its messages."""
        n = self.workers
        messages = {"umw": n, "gc": n, "rar": 2 * (n - 1) / n, "cr": self.tree.fanout}
        return messages[self.scheme] * rate.seconds(4 * self.elements)


def tolerates(tree: CodedTree, late: NDArray[np.bool_]) -> bool:
    """True if the root can decode without the stragglers and the messages they would forward."""
    answered: set[int] = set()
    for node in reversed(list(tree.top_down())):
        children = tree.children[node]
        arrived = frozenset(m for m, child in enumerate(children) if child in answered)
        decoded = not children or tree.codes[node].decode(arrived) is not None
        if node == TREE_ROOT:
            return decoded
        if decoded and not late[node]:
            answered.add(node)
    return False


@dataclass(frozen=True)
class Softmax:
    """Samples whose number of features makes a gradient of `elements` values for all classes."""

    elements: int
    samples: int = SOFTMAX_SAMPLE_COUNT
    models: int = MAX_MODEL_COUNT
    seed: int = 0

    @classmethod
    def for_workers(cls, workers: int, elements: int, seed: int) -> Softmax:
        """A problem with as many models as there is memory for all workers' messages."""
        most = MAX_TOTAL_MESSAGE_BYTES // (4 * elements * workers)
        return cls(elements, models=max(1, min(MAX_MODEL_COUNT, most)), seed=seed)

    @property
    def classes(self) -> int:
        """The number of classes, at least two."""
        return max(2, self.elements // SOFTMAX_FEATURE_COUNT)

    @property
    def features(self) -> int:
        return -(-self.elements // self.classes)

    @cached_property
    def _data(self) -> tuple[Single, NDArray[np.int64]]:
        draw = np.random.default_rng(self.seed)
        truth = draw.standard_normal((self.features, self.classes), dtype=np.float32)
        inputs = draw.standard_normal((self.samples, self.features), dtype=np.float32)
        return inputs, np.argmax(inputs @ truth, axis=1)

    @cached_property
    def _errors(self) -> list[Single]:
        """The predicted probabilities of each sample minus its true ones, by model."""
        inputs, labels = self._data
        model = np.zeros((self.features, self.classes), np.float32)
        found = []
        for _ in range(self.models):
            scores = inputs @ model
            odds = np.exp(scores - scores.max(axis=1, keepdims=True))
            error = odds / odds.sum(axis=1, keepdims=True)
            error[np.arange(self.samples), labels] -= 1
            found.append(error)
            model = model - SOFTMAX_LEARNING_RATE * (inputs.T @ error)
        return found

    @cached_property
    def true_gradients(self) -> list[Double]:
        """The sum over all samples in double precision, by model."""
        inputs, _ = self._data
        totals = [np.zeros((self.features, self.classes)) for _ in self._errors]
        for start in range(0, self.samples, SAMPLES_PER_FLOAT64_SUM):
            some = inputs[start : start + SAMPLES_PER_FLOAT64_SUM].T.astype(np.float64)
            for total, error in zip(totals, self._errors, strict=True):
                total += some @ error[start : start + SAMPLES_PER_FLOAT64_SUM]
        return [total.reshape(-1)[: self.elements] for total in totals]

    def gradients(self, allocation: Allocation) -> list[list[Single]]:
        """The sum over the samples of each cell of the allocation, by model."""
        inputs, _ = self._data
        cuts = [round(cut * self.samples) for cut in allocation.cuts]
        return [
            [
                np.ascontiguousarray(
                    (inputs[start:stop].T @ error[start:stop]).reshape(-1)[: self.elements]
                )
                for start, stop in pairwise(cuts)
            ]
            for error in self._errors
        ]


def message(gradients: Sequence[Single], weights: Mapping[int, float]) -> Single:
    """The message of a worker: its cells times their weights."""
    if list(weights.values()) == [1.0]:
        return gradients[next(iter(weights))]
    total = np.zeros_like(gradients[0], np.float64)
    for cell, weight in weights.items():
        total += weight * gradients[cell]
    return total.astype(np.float32)


def distance(one: Single | Double, truth: Single | Double) -> float:
    """The distance of two gradients relative to the norm of the true one."""
    return float(np.linalg.norm(one - truth) / np.linalg.norm(truth))
