"""One refit over several processes: what they tell one another, and in which order."""
