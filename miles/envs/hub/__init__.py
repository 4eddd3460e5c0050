"""`miles env …`: environments of any ecosystem, declared in miles.toml, fixed in miles.lock."""
