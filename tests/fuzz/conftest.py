"""Settings of the drawn tests: the same examples in every run, no clock, small ones in the fast set."""

import pytest
from hypothesis import HealthCheck, settings

SUPPRESSED = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much]
settings.register_profile(
    "ffnlab", derandomize=True, deadline=None, database=None, suppress_health_check=SUPPRESSED
)


@pytest.fixture(autouse=True, scope="session")
def profile() -> None:
    settings.load_profile("ffnlab")


settings.load_profile("ffnlab")
