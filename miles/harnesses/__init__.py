"""Programs that drive a model."""
