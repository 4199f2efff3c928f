"""The measurements that advice is based on, taken by all ranks between two steps: links and their
costs, compressors, and the compute time of a step."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from thalweg.catalog import default_catalog
from thalweg.declarations import Promise
from thalweg.facts import CodecCost, Costs, Situation, StragglerDelay, Workload
from thalweg.launch.launcher_variables import ONE_RACK_ASSUMPTION
from thalweg.plan import Plan
from thalweg.predict.candidates import candidates
from thalweg.predict.fitting import FREE_BACKEND_ASSUMPTION
from thalweg.probing.calibration import calibrate
from thalweg.redundancy import waits_for_nobody
from thalweg.training.auto.profile import Profile, ProfileResult, merged
from thalweg.training.lifecycle import RankSession

RUN_WORKLOAD_NAME = "this model"
NO_COMPUTE_ASSUMPTION = "computing takes no time"
log = logging.getLogger("thalweg")


class RunCalibrator:
    """The calibration of one run. Compressors are timed once, and only if they are allowed."""

    def __init__(self, session: RankSession, allow: Promise) -> None:
        self._session = session
        plans, _ = candidates(session.group, allow, default_catalog())
        precisions = [plan.precision for plan in plans if plan.precision is not None]
        self._codecs = list(dict.fromkeys(precisions))
        self._costs: Mapping[str, CodecCost] = {}
        self._profile: Profile | None = None
        self._profiled: ProfileResult | None = None
        # After a failed connection Gloo isn't tried again.
        self._native = not session.world.security.encrypted

    def start_profile(self) -> None:
        """Profile the compute time of steps from this one to the next calibration."""
        self.close()
        self._profile = Profile(self._session.trained, self._session.optimizer)

    def close(self) -> None:
        if self._profile is not None:
            self._profile.close()
            self._profile = None

    def calibrate(self) -> Situation:
        """Measure at a safe point of all ranks; the result is equal on all of them."""
        session, is_first = self._session, self._profiled is None
        if self._profile is not None:
            self._profiled = self._merged(self._profile)
            self.close()
        assert self._profiled is not None
        one_rack = ONE_RACK_ASSUMPTION in session.group.cluster.assumed  # nothing measures this
        if one_rack and is_first and session.rank == 0:
            log.info("no cluster file: assuming one rack; `thalweg probe` finds racks")
        measured = calibrate(
            session.world,
            session.abort_flag,
            session.engine,
            session.group.cluster,
            self._profiled.workload,
            codecs=() if self._costs else self._codecs,
            native=self._native,
            name=f"calibration/{session.step}",
            clock=session.clock,
        )
        self._costs = {**self._costs, **measured.machine.codecs}
        workload, assumed = self._profiled.workload, measured.machine.assumed
        self._native = FREE_BACKEND_ASSUMPTION not in assumed
        if workload.costs == Costs():
            assumed = (*assumed, NO_COMPUTE_ASSUMPTION)
        cluster = self._profiled.with_straggler_delays(measured.cluster)
        return replace(
            measured,
            cluster=replace(cluster, assumed=(ONE_RACK_ASSUMPTION,) if one_rack else ()),
            machine=replace(measured.machine, codecs=self._costs, assumed=assumed),
            workload=replace(workload, trained_with=type(session.optimizer).__name__.lower()),
        )

    def _merged(self, profile: Profile) -> ProfileResult:
        collectives = self._session.collectives
        # A rank may have had no gradients.
        steps = int(collectives.all_gather([len(profile)]).min())
        seconds = profile.seconds()
        figures = len(seconds) // max(1, len(profile))
        table = collectives.all_gather(seconds[len(seconds) - steps * figures :])
        if not steps:
            return ProfileResult(
                workload=Workload(name=RUN_WORKLOAD_NAME, tensors=profile.tensors),
                straggler_delays=(StragglerDelay(),) * self._session.group.size,
                spread=0.0,
            )
        return merged(RUN_WORKLOAD_NAME, profile.tensors, table)


def profiles_compute_alone(plan: Plan) -> bool:
    """True if a profile of the plan's steps contains computing alone: not if a step ends with
    averaging, torch's own path sends, or a compressor runs during backward."""
    return not (
        plan.averages_parameters
        or plan.precision is not None
        or waits_for_nobody(plan)
        or default_catalog().is_native(plan)
    )
