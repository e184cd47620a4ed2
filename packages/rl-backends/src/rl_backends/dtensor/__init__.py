"""The DTensor backend: FSDP2, and tensor parallelism by the plans of `rl_parallel_plans`."""
