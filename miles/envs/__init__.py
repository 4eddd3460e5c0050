"""Tasks, rewards and the adapters to other ecosystems."""
