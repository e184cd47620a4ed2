"""Settings of every test here."""

from hypothesis import HealthCheck, settings

# Timings decide nothing: by default an example that takes 0.2 s, as any may on a busy machine, fails its test.
settings.register_profile("no-clock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no-clock")
