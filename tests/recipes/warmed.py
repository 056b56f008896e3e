"""The Django site in a process that has used its locks before gunicorn forks the workers."""

from __future__ import annotations

from django_site import application as application
from django_site import locks

with locks.lock("warm"):
    held_by_the_parent = locks.lock("parent").acquire()
