"""Only what changed since a version that both sides hold: a codec of tensors, and the transport that uses it."""
