"""Hypothesis profiles: `default` for every run. By HYPOTHESIS_PROFILE: `thorough` for a long search by hand, `quick`
where time is short."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# No deadline: the machine may be shared. derandomize: a red run is red again on the next machine.
settings.register_profile(
    "default", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.register_profile("thorough", settings.get_profile("default"), derandomize=False, max_examples=2000)
settings.register_profile("quick", settings.get_profile("default"), max_examples=25)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
