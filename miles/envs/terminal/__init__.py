"""Small tasks for an agent in a terminal."""
