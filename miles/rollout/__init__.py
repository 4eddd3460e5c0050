"""Engines, the session server, episodes, scheduling, the buffer, evaluation."""
