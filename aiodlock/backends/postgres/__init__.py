"""Locks in PostgreSQL: tables and functions in a schema of their own."""

from .schema import create_statements, install
from .store import PostgresBackend

__all__ = ["PostgresBackend", "create_statements", "install"]
