"""A run over Ray, imported only by runs that use it: `build.py` puts the parts together.

`cluster.py` and `placement.py` say where ranks and engines run, `policy.py` and `training_worker.py` are the trainer,
`engine_pool.py`, `dispatch.py` and `engine_worker.py` the engines, `refit.py` and `colocation.py` what connects them.
The death of a rank or an engine is described in `worker_failures.py`.
"""
