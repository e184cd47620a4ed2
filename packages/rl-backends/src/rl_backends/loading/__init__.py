"""Models from a folder or the Hub: whole in one process, or shard by shard, each rank reading only what it holds."""
