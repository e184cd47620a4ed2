"""Plans: which rule shards which parameter, where the plan comes from, and what would make it wrong."""
