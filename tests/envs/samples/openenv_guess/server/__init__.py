"""Guess a number over OpenEnv."""
