"""Pipeline parallelism: a model split into stages, and the schedules that run them."""
