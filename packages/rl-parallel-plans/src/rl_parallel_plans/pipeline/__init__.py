"""Pipeline parallelism: `stages` cuts a model into modules of consecutive layers, `schedule` runs them over ranks."""
