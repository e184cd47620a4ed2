"""How a batch becomes microbatches, and a microbatch what a model reads. Pure arithmetic on the host, no model."""
