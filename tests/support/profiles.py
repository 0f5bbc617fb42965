"""How many examples hypothesis tries: at most 25 by default, as many as each test says where slow tests run too."""

from hypothesis import HealthCheck, settings

# A busy machine is no reason for a test to fail.
settings.register_profile("full", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# The same examples each time, so that the default run does not depend on chance.
settings.register_profile("quick", settings.get_profile("full"), max_examples=25, derandomize=True, database=None)


def examples(count: int, quick: int = 25) -> int:
    """Return how many examples a test tries.

    Args:
        count: in the full run.
        quick: in the default run, at most.
    """
    return min(count, quick) if settings.default.max_examples < 100 else count
