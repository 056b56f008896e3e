"""Locks in the frameworks that people use. docs/how-to/recipes.md explains each."""
