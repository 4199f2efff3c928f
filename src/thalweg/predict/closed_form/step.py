"""A step in closed form, for clusters that are too large to simulate.

Nothing is compiled and no link is counted: 100,000 workers take as long as a hundred. Uneven
clusters are taken for even ones with their largest rack, slowest NIC and slowest uplink. Each
bucket's exchange takes the seconds of its form (`topologies.py`), in the optimal number of chunks;
buckets follow one another on the links: bucket b begins when it is ready and b-1 has ended, so the
last one is exposed.

    T = forward + max{ backward, end of the last bucket } + encode + decode + optimizer

Encoding and decoding add to backward, as on one device. Stragglers cost the expected maximum of
their delays, as if all ranks waited for all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import sqrt

from thalweg.catalog import Catalog
from thalweg.compress import Compressor, Payload
from thalweg.errors import PlanError
from thalweg.facts import Bucket, CodecCost, Machine, TransportCosts, Workload
from thalweg.plan import Plan
from thalweg.predict.closed_form import topologies as forms
from thalweg.predict.closed_form.symbols import Cost, Symbols
from thalweg.predict.compiled_step import codec_cost
from thalweg.predict.estimate import Breakdown
from thalweg.predict.straggler_recurrence import expected_latest
from thalweg.schedules import Group
from thalweg.schedules.topologies.hierarchical import COMPRESS_BETWEEN
from thalweg.steps import warm_up

UNPIPELINED_TOPOLOGIES = ("halving_doubling",)  # their chunks don't overlap


def closed_form_breakdown(
    plan: Plan,
    group: Group,
    workload: Workload,
    transport: TransportCosts,
    machine: Machine,
    catalog: Catalog,
) -> Breakdown:
    """The breakdown of a step; PlanError for plans without a closed form."""
    exchanges = _PlanExchangeCosts(plan, group, transport, catalog)
    buckets = workload.buckets(plan.settings.bucket)
    seconds = [exchanges.seconds(bucket) for bucket in buckets]
    costs = workload.costs
    compute = costs.forward.seconds + costs.backward.seconds + costs.optimizer.seconds
    if plan.averages_parameters:
        hidden = plan.cadence.delay * compute  # by the steps until the result is applied
        exposed = max(0.0, sum(seconds) - hidden) / plan.cadence.every
    else:
        end = 0.0
        for bucket, lasts in zip(buckets, seconds, strict=True):
            end = max(end, bucket.ready_seconds) + lasts
        exposed = max(0.0, end - costs.backward.seconds)
    encode, decode = _codec_seconds(plan, buckets, exchanges, machine)
    waiting = expected_latest([group.cluster.host(rank).late for rank in group.ranks])
    return Breakdown(
        compute=compute, encode=encode, decode=decode, transfer=exposed, waiting=waiting
    )


def _codec_seconds(
    plan: Plan, buckets: Iterable[Bucket], exchanges: _PlanExchangeCosts, machine: Machine
) -> tuple[float, float]:
    if plan.precision is None:
        return 0.0, 0.0
    cost, encode, decode = codec_cost(plan.precision, machine), 0.0, 0.0
    for bucket in buckets:
        encode += cost.bucket.value + cost.encode.value * bucket.elements
        decode += exchanges.decoding(bucket, cost) * bucket.elements
    every = 1 if plan.cadence.inside else plan.cadence.every  # racks compress in between, too
    return encode / every, decode / every


@dataclass(frozen=True, slots=True)
class _AffineCost:
    """The seconds of a form as a function of bytes: affine but for the number of chunks, which
    grows with their square root."""

    whole: Cost  # of one byte, in one chunk
    is_cut: bool

    def seconds(self, nbytes: float) -> float:
        busiest, exposed = self.whole.busiest, self.whole.transfer - self.whole.busiest
        chunks = 1.0
        if self.is_cut and self.whole.each > 0:
            chunks = max(1.0, sqrt(exposed * nbytes / self.whole.each))
        latency = self.whole.latency + (chunks - 1) * self.whole.each
        return latency + nbytes * (busiest + exposed / chunks)


class _GroupCosts:
    """The costs of one group's exchanges; `form` is that of its all-reduce."""

    def __init__(
        self, x: Symbols, form: forms.ClosedForm, plan: Plan, compressor: Compressor | None
    ) -> None:
        one_byte = replace(x, S=1.0)
        self.size = x.N
        self._summable = compressor is None or compressor.summable
        self._elementwise = compressor is not None and compressor.elementwise
        self._shards = self._elementwise and not plan.averages_parameters
        self._added = _AffineCost(form(one_byte), plan.topology.name not in UNPIPELINED_TOPOLOGIES)
        self._gathered = _AffineCost(forms.all_gather(one_byte), False)
        self._exchanged = _AffineCost(forms.all_to_all(one_byte), False)

    def seconds(self, payload: Payload) -> float:
        if self._is_added(payload):
            return self._added.seconds(payload.nbytes)
        whole = self._gathered.seconds(self.size * payload.nbytes)
        return min(whole, self._two_shots(payload)) if self._shards else whole

    def decoding(self, payload: Payload, cost: CodecCost) -> float:
        """Seconds per element to decode the payload's result."""
        if self._is_added(payload):
            return cost.decode.value
        whole = self._gathered.seconds(self.size * payload.nbytes)
        if self._shards and self._two_shots(payload) < whole:
            return cost.decoding_shards
        return cost.decoding(self.size, always=not self._elementwise)

    def _is_added(self, payload: Payload) -> bool:
        return payload.exact or self._summable

    def _two_shots(self, payload: Payload) -> float:
        return self._exchanged.seconds(payload.nbytes) + self._gathered.seconds(payload.nbytes)


class _PlanExchangeCosts:
    """The costs of a plan's exchanges in closed form."""

    def __init__(self, plan: Plan, group: Group, costs: TransportCosts, catalog: Catalog) -> None:
        topology = plan.topology
        form, _ = forms.form_of(topology.name, topology.arguments, group)
        if form is None or _needs_simulation(plan):
            raise PlanError(
                f"{plan} has no closed form, and {group.size} workers are too many to simulate",
                "predict it for fewer workers",
            )
        x = _symbols(group, costs)
        rack, leaders = replace(x, N=x.G, C=1), replace(x, N=x.C, G=1)
        self._plan = plan
        self._compressor = catalog.compressors[plan.precision.name] if plan.precision else None
        self._between = plan.topology.arguments.get("compress") == COMPRESS_BETWEEN and x.C > 1
        self._chain = _AffineCost(forms.chain(replace(rack, S=1.0)), True)
        scopes = [leaders if self._between else x]
        if plan.topology.name == "shuffle":  # one rank of each rack, concurrent with the others
            rest = replace(rack, N=x.G - 1, G=x.G - 1)
            scopes = [leaders, rest] if x.G > 1 else [leaders]
        self._concurrent = [_GroupCosts(scope, form, plan, self._compressor) for scope in scopes]
        self._in_racks = _GroupCosts(rack, form, plan, self._compressor)

    def seconds(self, bucket: Bucket) -> float:
        """Seconds per period of the cadence: of the exchange among all ranks, and of those inside
        the racks at the other steps."""
        payloads = self._payloads(bucket)
        total = sum(max(group.seconds(each) for group in self._concurrent) for each in payloads)
        if self._between:
            total += 2 * self._chain.seconds(bucket.nbytes)
        if self._plan.cadence.inside:
            steps = self._plan.cadence.every - 1
            total += steps * sum(map(self._in_racks.seconds, payloads))
        return total

    def decoding(self, bucket: Bucket, cost: CodecCost) -> float:
        """Seconds per element to decode the exchange among all ranks."""
        payloads = self._payloads(bucket)
        return max(group.decoding(each, cost) for group in self._concurrent for each in payloads)

    def _payloads(self, bucket: Bucket) -> list[Payload]:
        if self._compressor is None or self._plan.precision is None:
            return [Payload("values", bucket.elements, bucket.itemsize, exact=True)]
        arguments = self._plan.precision.arguments
        return self._compressor.payloads(bucket.tensors, warm_up(self._plan), **arguments)


def _symbols(group: Group, costs: TransportCosts) -> Symbols:
    """The symbols with the rates that one flow reaches, and the per-message cost in alpha."""
    x, share = Symbols.of(group, 1.0), costs.bandwidth_share(1)
    return replace(
        x,
        alpha=x.alpha + costs.message.value,
        beta1=max(x.beta1 / share, costs.byte.value),
        beta2=x.beta2 / share,
    )


def _needs_simulation(plan: Plan) -> bool:
    """True for quorums, asynchronous plans and two concurrent levels, which have no closed form."""
    cadence = plan.cadence
    return plan.redundancy is not None or cadence.staleness is not None or cadence.two_levels
