"""The miles command: parse, look up, call."""
