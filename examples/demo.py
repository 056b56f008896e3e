"""The main job, shown on a real server: worker processes take turns on one ledger file.

Run it with ``make demo`` or ``python -m examples.demo``; where the package is installed, with
``aiodlock demo``. Its code is in ``aiodlock/cli/_demo.py``; the part that locks is in ``_demo_worker.py``.
"""

from __future__ import annotations

import asyncio
import sys

from aiodlock.cli import _demo

if __name__ == "__main__":
    sys.exit(0 if asyncio.run(_demo.run()) else 1)
