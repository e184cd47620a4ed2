"""Plans for transformers recognised by their parts: one rule for each kind of block, none for each class."""
