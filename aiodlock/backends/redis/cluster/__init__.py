"""Redis Cluster: each name lives on the primary that owns its slot.

``backend`` is what the core calls, ``topology`` knows which node owns which slot, ``node`` is one primary,
``seeds`` reads what a user gave.
"""

from .backend import ClusterBackend
from .seeds import seeds_of

__all__ = ["ClusterBackend", "seeds_of"]
