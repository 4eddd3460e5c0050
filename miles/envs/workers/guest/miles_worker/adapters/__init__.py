"""One module a kind of environment: `make(settings)` gives an adapter (docs/env-workers.md)."""
