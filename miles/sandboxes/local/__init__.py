"""Sandboxes on this host: bubblewrap, or plain processes where that is wanted."""
