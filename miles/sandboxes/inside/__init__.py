"""A sandbox over any provider: the process inside that runs commands, and the host's side of it."""
