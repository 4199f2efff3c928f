"""The runs of the GRACE paper (Xu et al., ICDCS 2021): a speed-up of each compressed run against
one without compression in the same set-up, and a model of it made of physical terms.

    T_none   = T_comp + wire / rate
    T_method = T_comp + tensors c + elements e + T_comm'

T_none is what the user measured before compressing. T_comp is what a user's own runs on 2, 4 and 8
workers say: with wire bytes of 2(p-1)/p S they lie on T_comp + wire / rate. The row's effective
rate follows from both. Fitted, in logarithms and on other models alone, are c and e of each method
(per tensor, per element), a message's latency, decoding of gathered payloads, and how much better
gathering uses the links than adding up does; and, if so chosen, one factor for all c and one for
all e, since all of them were implemented by the same people in the same frameworks.

How far guesses are trusted, and whether there are such factors, is chosen for each model without
it: by leaving out each of the others in turn.

Payloads are as GRACE implements them: a byte for every sign or level, four for a value, four for an
index. Its powersgd and threshold don't say theirs; 1 % and a share by threshold are assumed.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import log
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.predict.robust import Guess, Vector, fit_constants

Mask = NDArray[np.bool_]
USUAL = 0.2  # of a logarithm: a fifth off


@dataclass(frozen=True, slots=True)
class Choice:
    """Of how constants are fitted."""

    trust: float  # in guesses
    factors: bool  # whether all methods share one for tensors, and one for elements


CHOICES = [Choice(*each) for each in product((0.1, 0.3, 1.0, 3.0, 10.0), (False, True))]


@dataclass(frozen=True, slots=True)
class Model:
    elements: float
    tensors: int
    batch: int  # a worker; 1 where throughput counts steps


MODELS = {
    "resnet50": Model(25.56e6, 161, 128),
    "densenet40_k12": Model(0.36e6, 120, 256),
    "resnet20_v2": Model(0.27e6, 65, 256),
    "LSTM": Model(19.78e6, 8, 1),
    "Resnet9": Model(6.57e6, 26, 512),
}
# Seconds an element, before anything is fitted: the V100 times of Agarwal et al. for ResNet-50
PASS, SELECTION, LOW_RANK = 16.3e-3 / 25.56e6, 240e-3 / 25.56e6, 45e-3 / 25.56e6
ELEMENT = {"powersgd": LOW_RANK, **dict.fromkeys(("topk", "dgc", "adaq", "sketch"), SELECTION)}
TENSOR = 3e-4  # seconds: some ten kernels, called from Python
SHARE = {"0.01": 0.01, "0.001": 0.05, "0.0001": 0.3}  # that exceeds a threshold


def method_of(name: str) -> str:
    base = name.split("_")[0]
    return "sign" if base in ("signsgd", "signum") else base


def payload_of(name: str) -> float:
    """Bytes an element."""
    method = method_of(name)
    found = re.search(r"(ratio|thres|q)=([\d.]+)", name)
    value = found[2] if found else ""
    if method in ("topk", "dgc"):
        return 8 * float(value)
    if method == "adaq":  # an index, and one byte for a level
        return 5 * float(value)
    if method == "randomk":
        return 4 * float(value)
    if method == "threshold":
        return 8 * SHARE[value]
    if method == "powersgd":
        return 4 * 0.01
    most = {"qsgd": 64, "sketch": 128}.get(method)  # levels that fit into a byte
    return 2.0 if most is not None and int(value) > most else 1.0


class Runs:
    """Columns of the table, and what follows from them before anything is fitted."""

    def __init__(self, path: Path) -> None:
        with path.open() as file:
            rows = list(csv.DictReader(file))
        self.models = np.array([row["model"] for row in rows])
        self.names = [row["method_name"] for row in rows]
        self.methods = sorted({method_of(name) for name in self.names})
        self.which = np.array([self.methods.index(method_of(name)) for name in self.names])
        known = [MODELS[row["model"]] for row in rows]
        self.elements = np.array([model.elements for model in known])
        self.tensors = np.array([float(model.tensors) for model in known])
        self.workers = np.array([float(row["workers"]) for row in rows])
        self.gathered = np.array([row["collective"] == "allgather" for row in rows])
        self.payload = self.elements * np.array([payload_of(name) for name in self.names])
        throughput = np.array([float(row["baseline_throughput"]) for row in rows])
        self.none = np.array([model.batch for model in known]) * self.workers / throughput
        self.speedup = np.array([float(row["speedup"]) for row in rows])
        self.networks = [(row["bw"], row["rdma"], row["backend"]) for row in rows]
        self.wire = 2 * (self.workers - 1) / self.workers * 4 * self.elements
        self._known: dict[tuple[frozenset[str], Choice], Vector] = {}
        self.alone = self._alone()
        self.rate = self.wire / (self.none - self.alone)

    def _alone(self) -> Vector:
        """T_comp of each row's model, for which its baselines lie best on straight lines over
        wire bytes, one line a network."""
        alone = np.empty(len(self.none))
        for model in MODELS:
            own = self.models == model
            points: dict[tuple[str, str, str], set[tuple[float, float]]] = {}
            for i in np.flatnonzero(own):
                points.setdefault(self.networks[i], set()).add((self.none[i], self.wire[i]))
            lines = [sorted(line) for line in points.values() if len(line) > 1]
            tried = np.linspace(0.02, 0.99, 98) * self.none[own].min()
            alone[own] = min(tried, key=lambda compute: sum(_miss(compute, x) for x in lines))
        return alone

    def seconds(self, constants: Vector) -> Vector:
        latency, decoding, better = constants[:3]
        tensor, element = constants[3:].reshape(2, -1)[:, self.which]
        p = self.workers
        codec = self.tensors * tensor + self.elements * element
        gathering = (
            self.tensors * (p - 1) * latency
            + decoding * p * self.payload
            + (p - 1) * self.payload / (better * self.rate)
        )
        adding = 2 * (p - 1) / p * self.payload / self.rate
        found: Vector = self.alone + codec + np.where(self.gathered, gathering, adding)
        return found

    def fit(self, rows: Mask, choice: Choice) -> Vector:
        each = len(self.methods)
        guesses = [
            Guess(5e-5, 1.0),
            Guess(1e-10, 1.0),
            Guess(1.0, 0.4),
            *(Guess(TENSOR, 1.0) for _ in self.methods),
            *(Guess(ELEMENT.get(method, PASS), 1.0) for method in self.methods),
            *([Guess(1.0, 2.0)] * 2 if choice.factors else []),
        ]

        def multiplied(found: Vector) -> Vector:
            if not choice.factors:
                return found
            by = np.repeat([1.0, *found[-2:]], [3, each, each])
            return np.asarray(found[:-2] * by, np.float64)

        def errors(constants: Vector) -> Vector:
            predicted = self.none / self.seconds(multiplied(constants))
            found: Vector = np.log(predicted / self.speedup)[rows]
            return found

        return multiplied(fit_constants(errors, guesses, usual=USUAL, trust=choice.trust))

    def predicted(self, left_out: frozenset[str], choice: Choice) -> Vector:
        """Speed-ups of all rows, from constants of the models that aren't left out."""
        if (left_out, choice) not in self._known:
            rows = ~np.isin(self.models, list(left_out))
            seconds = self.seconds(self.fit(rows, choice))
            self._known[left_out, choice] = self.none / seconds
        return self._known[left_out, choice]

    def left_out(self) -> Vector:
        """Speed-ups, those of each model predicted, and the choice made, from the others alone."""
        found = np.empty(len(self.none))
        for model in MODELS:
            own = self.models == model
            found[own] = self.predicted(frozenset({model}), self.chosen_without(model))[own]
        return found

    def chosen_without(self, model: str) -> Choice:
        others = [other for other in MODELS if other != model]
        rows = self.decided & (self.models != model)

        def loss(choice: Choice) -> float:
            predicted = np.ones(len(self.none))
            for other in others:
                own = self.models == other
                predicted[own] = self.predicted(frozenset({model, other}), choice)[own]
            return doubt(predicted[rows], self.speedup[rows])

        return min(CHOICES, key=loss)

    @property
    def decided(self) -> Mask:
        """Rows that aren't within 5 % of no change."""
        found: Mask = np.abs(self.speedup - 1) > 0.05
        return found


def _miss(compute: float, line: Sequence[tuple[float, float]]) -> float:
    """How far off a network's baselines are at the best of the rates that they give."""
    slopes = [(seconds - compute) / wire for seconds, wire in line]
    return min(
        sum(abs(log((compute + wire * slope) / seconds)) for seconds, wire in line)
        for slope in slopes
    )


def balanced_accuracy(predicted: Vector, actual: Vector) -> float:
    """The mean of the shares of runs that pay, and of those that don't, that are said to."""
    said, pays = predicted > 1, actual > 1
    return float((said[pays].mean() + (~said)[~pays].mean()) / 2)


def doubt(predicted: Vector, actual: Vector) -> float:
    """The logistic loss of saying whether runs pay, a prediction being a `USUAL` error wide; those
    that do and those that don't count alike."""
    pays = actual > 1
    loss = np.logaddexp(0, np.where(pays, -1, 1) * np.log(predicted) / USUAL)
    return float((loss[pays].mean() + loss[~pays].mean()) / 2)
