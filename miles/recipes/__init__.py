"""Recipes, and the one place that names concrete classes."""
