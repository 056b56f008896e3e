"""The command ``aiodlock``: run under a lock, look at locks, break them, examine a server.

_app.py       the commands and their options      _show.py     what they print
_top.py       ``top``: the live table, and the key that ends it
_run.py       ``run``: the parent, which holds the lease
_guardian.py  ``run``: the process beside the command, which ends it in time by itself
_doctor.py    ``doctor``: which store it is    _finding.py  what was found, what it means, how to fix it
_streams.py   standard error that never fails, and what a failing output means
_web.py       ``web``: the page, served on this machine
_deadlocks.py  ``deadlocks``: the cycles that stand
_init.py      ``init``: what PostgreSQL needs before the first lock
_doctor_STORE.py  what each store needs
_demo.py      ``demo``: what is shown       _demo_worker.py   its processes, which take turns
_bench.py     ``bench``: what a lock costs on a server
"""

from __future__ import annotations

import sys

from ._streams import prepare


def main() -> None:
    """Run the command line."""
    prepare()
    try:
        import rich as rich
        import typer as typer
    except ImportError as missing:
        print(
            f"aiodlock: the command needs {missing.name}: pip install 'aiodlock[cli]'",
            file=sys.stderr,
        )
        raise SystemExit(70) from None
    # redis-py imports OpenTelemetry's SDK where that is installed: a fifth of a start, for nothing here.
    sys.modules.setdefault("opentelemetry.sdk", None)  # type: ignore[arg-type]
    from ._app import app

    app()
