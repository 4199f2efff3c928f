"""Parameter plans: every rank takes its own step, then parameters are averaged in its group.

What is averaged is more than parameters: batch norm's statistics always, the optimizer's state if
the plan says so; all of it in float32 at least, whatever its type is. A result that is applied late
(`delay=1`, or a meeting that lasts several steps) travels while the next steps are computed:
x += mean(x') - x', where x' is what was sent, so that the steps taken meanwhile are kept. Either
way the mean over all ranks stays what it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import monotonic

import torch

from thalweg.compress import arrange
from thalweg.engine.engine import Chain, Engine, Task
from thalweg.errors import Interrupted, StoreLost
from thalweg.plan import Plan
from thalweg.schedules import Contention, Group
from thalweg.training.buckets import FlatBucket, Layout, as_array, scaled_into
from thalweg.training.compiled_steps import Clock, Itinerary, Stop
from thalweg.training.compressor_state import KeepsNothing
from thalweg.training.contention_monitor import Watch
from thalweg.training.exchanges.compressed import CompressedBucket, Compression
from thalweg.training.optimizer_state import never_negative

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Exchange:
    """Under way; to be applied when the optimizer takes step `due`."""

    futures: tuple[Future[None], ...]
    buckets: tuple[FlatBucket, ...]
    due: int
    late: bool


class ParameterAverager(KeepsNothing):
    """`tensors` is asked, with the step, after the first: an optimizer has no state before. `watch`
    adjusts the groups, in plans that have several. Before the step `begins` nobody is met;
    `broken_off` is called when members are to meet anew: then everybody keeps what it has."""

    def __init__(
        self,
        tensors: Callable[[int], Tensors],
        plan: Plan,
        group: Group,
        engine: Engine,
        clock: Clock,
        watch: Callable[[Group, int], Watch] | None = None,
        *,
        begins: int = 0,
        broken_off: Callable[[], None] = lambda: None,
    ) -> None:
        self._begins = begins
        self._broken_off = broken_off
        self._ask_for_tensors = tensors
        self._plan = plan
        self._group = group
        self._engine = engine
        self._clock = clock
        self._make_watch = watch
        self._under_way: list[_Exchange] = []
        self._sent: dict[str, torch.Tensor] = {}
        self._over = monotonic()  # when the last step's exchange was
        self.tensors: Tensors = {}  # that are averaged
        self._layout: Layout | None = None
        self._itinerary: Itinerary | None = None
        self._compressed: dict[int, CompressedBucket] = {}
        self._watch: Watch | None = None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients never travel under this plan."""
        yield

    def after_step(self) -> None:
        if self._clock.step < self._begins:
            return
        if not self._met():
            self._broken_off()

    def _met(self) -> bool:
        try:
            self._meet()
        except (Interrupted, StoreLost):
            return False
        return True

    @torch.no_grad()
    def _meet(self) -> None:
        busy = monotonic() - self._over
        layout, itinerary = self._ready
        step = self._clock.step
        self._finish(step)
        leg = itinerary.at(step)
        first = self._clock.claim(leg.numbers)
        futures, buckets = [], []
        for bucket in layout.buckets:
            stops = leg.of(bucket.index)
            if not stops:
                continue
            self._fill(bucket, 1 / stops[0].divisor, keep=stops[0].round.delay > 0)
            futures.append(self._engine.submit(self._way(bucket, stops, step, first)))
            buckets.append(bucket)
        if leg.stops:
            delay = leg.stops[0].round.delay
            exchange = _Exchange(tuple(futures), tuple(buckets), step + delay, delay > 0)
            self._under_way.append(exchange)
        if self._watch is not None:  # while that travels
            self._watch.tell(step, busy)
            self._watch.look(step)
        if self._plan.cadence.delay == 0:
            self._finish(step)
        self._over = monotonic()

    @torch.no_grad()
    def settle(self) -> None:
        """Wait for what is under way, and apply it."""
        self._finish(None)

    def detach(self) -> None:
        self.settle()

    def break_off(self) -> None:
        self._under_way.clear()
        self._compressed.clear()
        self._sent.clear()
        self._layout = None

    def look_again(self) -> None:
        """From this step on, average all that there is by then."""
        self.settle()
        self._layout = None

    @property
    def adjusts(self) -> bool:
        """Whether its groups follow what the links give."""
        return self._make_watch is not None

    def adopt(self, contention: Contention) -> None:
        """From this step on, meet by the table that keeps these apart."""
        self.settle()
        self._group = replace(self._group, contention=contention)
        if self._layout is not None:
            self._itinerary = self._route(self._layout)
        if self._watch is not None:
            self._watch.adopt(contention, self._clock.step)

    @property
    def _ready(self) -> tuple[Layout, Itinerary]:
        if self._layout is None or self._itinerary is None:
            return self._prepare()
        return self._layout, self._itinerary

    def _prepare(self) -> tuple[Layout, Itinerary]:
        self.tensors = self._ask_for_tensors(self._clock.step)
        compression = Compression.of(self._plan)
        limit = self._plan.settings.bucket
        arranged = arrange if compression is None else compression.arrange
        self._layout = Layout.of(self.tensors, limit, arranged, in_float32=True)
        if compression is not None:
            self._compressed = {
                bucket.index: CompressedBucket(bucket, compression, self._engine.rank)
                for bucket in self._layout.buckets
            }
        self._itinerary = self._route(self._layout)
        if self._make_watch is not None:
            self._watch = self._make_watch(self._group, self._layout.workload.nbytes)
        return self._layout, self._itinerary

    def _route(self, layout: Layout) -> Itinerary:
        return Itinerary(self._plan, self._group, layout.workload, self._engine.rank)

    def _way(self, bucket: FlatBucket, stops: list[Stop], step: int, first: int) -> Task | Chain:
        if bucket.index in self._compressed:
            return self._compressed[bucket.index].chain(stops, step, first)
        [stop] = stops
        return stop.task(bucket, step, first)

    def _fill(self, bucket: FlatBucket, factor: float, *, keep: bool) -> None:
        for name, view in bucket.views.items():
            scaled_into(view, self.tensors[name], factor)
            if keep:
                if name not in self._sent:
                    self._sent[name] = torch.empty_like(self.tensors[name])
                self._sent[name].copy_(self.tensors[name])

    def _finish(self, step: int | None) -> None:
        """What is due at this step; all if None."""
        over = [e for e in self._under_way if step is None or e.due <= step]
        self._under_way = [e for e in self._under_way if e not in over]
        for exchange in over:
            self._engine.wait(list(exchange.futures))
            for bucket in exchange.buckets:
                self._apply(bucket, late=exchange.late)

    def _apply(self, bucket: FlatBucket, *, late: bool) -> None:
        for name, view in bucket.views.items():
            tensor = self.tensors[name]
            if late:
                tensor.add_(view.to(tensor.device) - self._sent[name])
            else:
                tensor.copy_(view)
            if never_negative(name) and (late or self._compressed):
                tensor.clamp_(min=0)


@dataclass(frozen=True, slots=True)
class _Crossing:
    """A part of a bucket on its way between the racks."""

    future: Future[None]
    bucket: int
    span: tuple[int, int]
    sent: torch.Tensor  # the rack's mean
    held: torch.Tensor  # all racks', when it is over


class TwoLevelAverager(ParameterAverager):
    """Two levels, the upper one late: racks average at every step, all racks one step behind.

    With m(t) a rack's mean after step t, and M(t) the mean of all racks' by their sizes:

        m(t+1) = mean over the rack of x(t+1)  +  M(t) - m(t)

    so the exchange between racks has a whole step to travel. The j-th host of each rack exchanges
    the j-th part of its rack's mean with its like, and adds what the others bring, G_c times, to
    its own contribution to the rack's next average, which hands it to all. No byte more crosses a
    link than for the exact average, and replicas differ by one step's noise between racks: its
    variance is (1 - 1/C) / G of one worker's.
    """

    _meets = False  # racks, and what comes of it isn't applied; the same on all ranks
    _crossing: tuple[_Crossing, ...] = ()

    @torch.no_grad()
    def _meet(self) -> None:
        inside, across = self._stops(self._clock.step)
        first = self._clock.claim(2 * len(self._ready[0].buckets))
        self._average(inside, first)
        for stop in across:
            self._cross(stop, first)
        self._meets = (self._clock.step + 1) % self._plan.cadence.every == 0

    @torch.no_grad()
    def settle(self) -> None:
        """Wait for what is under way, and hand it to the rack."""
        if self._meets:
            self._meets = False
            inside, _ = self._stops(self._clock.step)
            self._average(inside, self._clock.claim(2 * len(self._ready[0].buckets)))

    def break_off(self) -> None:
        """What is between the racks is lost: every rack keeps its own mean."""
        self._crossing = ()
        self._meets = False

    def _stops(self, step: int) -> tuple[list[Stop], list[Stop]]:
        """Inside the rack, and between racks."""
        stops = self._ready[1].at(step).stops
        return [s for s in stops if not s.round.delay], [s for s in stops if s.round.delay]

    def _average(self, stops: list[Stop], first: int) -> None:
        layout, _ = self._ready
        crossed, self._crossing = self._crossing, ()
        futures = []
        for stop in stops:
            bucket = layout.buckets[stop.round.bucket]
            self._fill(bucket, 1 / stop.divisor, keep=False)
            for crossing in crossed:
                if crossing.bucket == bucket.index:
                    self._engine.wait([crossing.future])
                    part = bucket.flat[slice(*crossing.span)]
                    part.add_(crossing.held).sub_(crossing.sent)
            futures.append(self._engine.submit(stop.task(bucket, self._clock.step, first)))
        self._engine.wait(futures)
        for bucket in layout.buckets:
            for name, view in bucket.views.items():
                self.tensors[name].copy_(view)
                if never_negative(name):
                    self.tensors[name].clamp_(min=0)

    def _cross(self, stop: Stop, first: int) -> None:
        bucket = self._ready[0].buckets[stop.round.bucket]
        sent = bucket.flat[slice(*stop.round.span)].clone()
        rack = next(rack for rack in self._group.racks if self._engine.rank in rack)
        held = sent * (len(rack) / self._group.size)
        task = stop.task(bucket, self._clock.step, first, as_array(held))
        future = self._engine.submit(task)
        crossing = _Crossing(future, bucket.index, stop.round.span, sent, held)
        self._crossing = (*self._crossing, crossing)
