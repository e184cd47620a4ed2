"""Other projects' environments as ours. Importing this imports none of them; each module says which extra it needs."""
