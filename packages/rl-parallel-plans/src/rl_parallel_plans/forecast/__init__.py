"""The peak memory of a training step on each rank, predicted with fake tensors and a fake process group.

Calls `parallelize` on a model without weights and runs one step of which every storage is counted: no GPU, no second
process of the job, no weights. Knows torch and the plans of this package; knows no formula of any model.
"""
