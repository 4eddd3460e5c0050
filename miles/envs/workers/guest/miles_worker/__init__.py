"""The worker's side; adapters import `miles_worker.protocol`."""
