"""A page that shows locks, live: mount it in an app, or run ``aiodlock web``.

    app.mount("/locks", aiodlock.web.app(client))

The page is read-only unless ``read_only=False``. It has no login of its own: the app that mounts it decides
who may see it. It needs no network besides its own address, and no build step.

A map of the package::

    _app.py     the routes: the names, one name, breaking it, the live events
    _watch.py   what is in the store: one poll for all viewers, none while nobody looks
    _sightings.py  what was seen of the names, and what follows: losses, hand-overs, sums
    _history.py the last minutes, as they are drawn
    _view.py    which rows a viewer sees, and in which words
    _guard.py   which requests are refused: hosts, other sites, forged forms
    templates/  Jinja2, which escapes every value       static/  the style and the script
"""

from __future__ import annotations

try:
    import jinja2 as _jinja2  # noqa: F401
    import starlette as _starlette  # noqa: F401
except ImportError as _missing:
    raise ImportError(
        "aiodlock.web needs Starlette and Jinja2: pip install 'aiodlock[web]'"
    ) from _missing

from ._app import app as app

__all__ = ["app"]
