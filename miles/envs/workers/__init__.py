"""Environments in processes and Pythons of their own."""
