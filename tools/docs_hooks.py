"""What mkdocs is told besides ``mkdocs.yml``.

- Pages that are made from other files: CHANGELOG.md, CONTRIBUTING.md, SECURITY.md.
- The reference: mkdocstrings makes it with links, in place of what the pages have for the repository.
- The version and the repository, from ``pyproject.toml``.
- Scripts of others, so that the site needs no network: a page loads them from ``assets/``.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

from tools.excerpts import SECTION
from tools.npm import SCRIPTS, fetch
from tools.standard_library import BASE, write_inventory

ROOT = Path(__file__).parents[1]
#: Pages whose text stands in the root of the repository, where people look for it.
FROM_ROOT = {
    "project/changelog.md": "CHANGELOG.md",
    "project/contributing.md": "CONTRIBUTING.md",
    "project/security.md": "SECURITY.md",
}
_PICTURE = re.compile(r'<p><img [^>]*src="[^"]*assets/pictures/([a-z-]+\.svg)"[^>]*></p>')
#: Colours for who reads the page in the repository, where a drawing is an image.
_STYLE = re.compile(r"\s*<style>.*?</style>", re.DOTALL)
DIAGRAM = '<pre class="mermaid">'


@event_priority(100)  # type: ignore[misc,untyped-decorator,unused-ignore]  # before mkdocstrings
def on_config(config: Any, **_: Any) -> Any:
    config.site_name = f"aiodlock {_project()['version']}"
    config.repo_url = _repository()
    config.repo_name = "Repository"
    inventory = ROOT / "build" / "python.inv"
    inventory.parent.mkdir(exist_ok=True)
    write_inventory(inventory)
    python = config.plugins["mkdocstrings"].config.handlers.setdefault("python", {})
    python["inventories"] = [{"url": inventory.as_uri(), "base_url": BASE}]
    return config


def on_files(files: Files, *, config: Any, **_: Any) -> Files:
    for script in SCRIPTS:
        source = str(fetch(script))
        files.append(File.generated(config, f"assets/{script.name}", abs_src_path=source))
    for page, source in FROM_ROOT.items():
        files.append(File.generated(config, page, content=_moved((ROOT / source).read_text())))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    page.meta.setdefault("search", _weight(page.file.src_uri))
    up = "../" * page.file.src_uri.count("/")
    for moved, source in (FROM_ROOT | {"index.md": "README.md"}).items():
        markdown = markdown.replace(f"]({up}../{source}", f"]({up}{moved}")
    return SECTION.sub(_directive, markdown)


def _weight(page: str) -> dict[str, Any]:
    """Return how much a page counts in the search: users' pages come first, and a list of changes never."""
    if page == "project/changelog.md":
        return {"exclude": True}
    return {"boost": 0.3 if page.startswith(("internals/", "project/")) else 1}


def _directive(found: re.Match[str]) -> str:
    """Let mkdocstrings make what stands in a page for who reads it in the repository."""
    if found["kind"] != "reference":
        return found["text"]
    options = "\n    options:\n      merge_init_into_class: false\n      show_bases: false\n"
    return f"::: {found['name']}{options if found['bare'] else ''}"


def on_page_content(html: str, **_: Any) -> str:
    """Put drawings into the page itself: there they take its colours, which the reader may switch."""
    return _PICTURE.sub(_drawn, html)


def _drawn(found: re.Match[str]) -> str:
    drawing = (ROOT / "docs" / "assets" / "pictures" / found[1]).read_text("utf-8")
    return f'<div class="figure">{_STYLE.sub("", drawing)}</div>'


def on_post_page(output: str, *, page: Any, **_: Any) -> str:
    """Load the script that draws diagrams on the pages that have one: it is 3 MB."""
    if DIAGRAM not in output:
        return output
    up = "../" * page.url.count("/")
    script = f'<script src="{up}assets/mermaid.min.js"></script>'
    return output.replace("</head>", f"{script}</head>", 1)


def _moved(text: str) -> str:
    """Let links of a file in the root lead from a page in ``docs/project``, or to the repository."""
    text = text.replace("](docs/", "](../")
    return re.sub(
        r"\]\((?!https?://|\.\./|#)([^)]*/[^)]*)\)", rf"]({_repository()}/blob/main/\1)", text
    )


def _project() -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return project


def _repository() -> str:
    repository: str = _project()["urls"]["Repository"]
    return repository
