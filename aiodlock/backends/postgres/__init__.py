"""Locks in PostgreSQL: tables and functions in a schema of their own."""
