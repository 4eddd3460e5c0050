"""What runs inside a worker: the standard library and the environment's own packages, nothing of Miles."""
