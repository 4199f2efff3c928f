"""Payloads of values and their indices: 4 bytes for each of the k values of all tensors, then 4 for
each of their places in the whole vector.

Where a codec chooses fewer than k, the payload is filled up with zeros.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np

from thalweg.compress.arrangement import Segment
from thalweg.compress.codec import Array, Gathered
from thalweg.compress.compressor import Payload, kept, pays
from thalweg.compress.feedback import refuse_not_finite
from thalweg.compress.kernels import Kernels
from thalweg.compress.seeds import generator
from thalweg.compress.selection import Selection
from thalweg.errors import WorkloadError
from thalweg.facts import Tensor


def takes(tensor: Tensor, ratio: float, **_: object) -> bool:
    return pays(tensor, 8 * kept(tensor.elements, ratio))


def sizes(tensors: Sequence[Tensor], step: int, ratio: float, **_: object) -> list[Payload]:
    k = sum(kept(tensor.elements, ratio) for tensor in tensors)
    return [Payload("values and indices", k, 8)]


class Sparse(Gathered):
    """What is sent is sent exactly, so what is left out is the rest: `values`, cleared there."""

    def __init__(
        self, segments: Sequence[Segment], length: int, kernels: Kernels, ratio: float
    ) -> None:
        super().__init__(segments, length, kernels)
        if length > np.iinfo(np.int32).max:
            raise WorkloadError(
                f"{length:,} elements travel together, too many for indices of 4 bytes",
                "use another compressor for a tensor of this size, or smaller buckets",
            )
        self._counts = [kept(segment.elements, ratio) for segment in segments]
        self._chosen = np.empty(sum(self._counts), np.intp)
        self.selection = Selection(max(segment.elements for segment in segments))

    @abstractmethod
    def choose(self, values: Array, k: int, source: np.random.Generator) -> Array:
        """At most k places of a tensor."""

    @property
    def nbytes(self) -> int:
        return 8 * len(self._chosen)

    def encode(self, values: Array, payload: Array, step: int, rank: int, *, keep: bool) -> None:
        if not keep:
            refuse_not_finite(self.segments, values)
        chosen, count = self._chosen, 0
        for segment, k in zip(self.segments, self._counts, strict=True):
            places = self.choose(values[segment.place], k, generator(step, segment.name))
            np.add(places, segment.start, out=chosen[count : count + len(places)])
            count += len(places)
        sent, indices = parts(payload)
        chosen[count:] = 0
        indices[:] = chosen
        sent[:] = values[chosen]
        sent[count:] = 0
        if keep:
            self.clear(values, chosen[:count])

    def clear(self, values: Array, sent: Array) -> None:
        values[sent] = 0

    def add_up(self, payloads: Sequence[Array], out: Array) -> None:
        out[:] = 0
        for payload in payloads:
            sent, indices = parts(payload)
            np.add.at(out, indices.astype(np.intp), sent)


def parts(payload: Array) -> tuple[Array, Array]:
    """The values and the indices in a payload of bytes."""
    middle = len(payload) // 2
    return payload[:middle].view(np.float32), payload[middle:].view(np.int32)
