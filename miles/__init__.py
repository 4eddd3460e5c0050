"""Miles: any environment, any agent harness, any sandbox; one asynchronous RL trainer."""

__version__ = "0.1.0"
__all__ = ["__version__"]
