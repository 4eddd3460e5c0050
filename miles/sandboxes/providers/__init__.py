"""Sandboxes of engines and clouds, by their SDKs."""
