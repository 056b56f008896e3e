"""Many parts of a soak with a record in a file: stopped at any time, continued later, summed up by store.

The file has one line of JSON per part that has ended, with the hash of the tree it ran on.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

from .soak import Result

_ROOT = Path(__file__).parents[2]


def tree_hash() -> str:
    """Return a hash of the library and of the soak."""
    digest = sha256()
    for folder in ("aiodlock", "tests/soak"):
        for path in sorted((_ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".lua", ".sql"):
                digest.update(f"{path.relative_to(_ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def parts(path: Path) -> list[tuple[str, Result]]:
    """Return the parts in a file, each with its tree. A line that was cut off is left out."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")[:-1]
    found = []
    for line in lines:
        fields: dict[str, Any] = json.loads(line)
        tree = str(fields.pop("tree"))
        found.append((tree, Result(**fields)))
    return found


def run(path: Path, store: str, minutes: float, part: Callable[[float], Result | None]) -> bool:
    """Run parts until a store has its minutes; return whether there were violations.

    :param part: runs a part of at most so many minutes; None: it is not to go on.
    """
    if path.exists():
        text = path.read_text()
        path.write_text(text[: text.rfind("\n") + 1])  # a line that was cut off
    while True:
        done = sum(result.minutes for _, result in parts(path) if result.store == store)
        if minutes - done < 0.05:
            break
        tree, result = tree_hash(), part(minutes - done)
        if result is None:
            break
        with path.open("a") as file:
            file.write(json.dumps({"tree": tree, **asdict(result)}) + "\n")
    print(summary([path]))
    return any(result.violations for _, result in parts(path) if result.store == store)


def summary(paths: Sequence[Path]) -> str:
    """Return a table: what each store's parts came to."""
    by_store: dict[str, list[tuple[str, Result]]] = {}
    for path in paths:
        for tree, result in parts(path):
            by_store.setdefault(result.store, []).append((tree, result))
    rows = [
        "| store | minutes | parts | trees | acquisitions | lost and told | processes | faults "
        "| longest wait | longest without a holder (bound) | load | violations | not judged |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    bad = []
    for store, found in by_store.items():
        results = [result for _, result in found]
        counts = _added(result.counts for result in results)
        rows.append(
            f"| {store} | {sum(one.minutes for one in results):.0f}{_judged(results)} | {len(results)} "
            f"| {', '.join(sorted({tree for tree, _ in found}))} | {counts['acquisitions']:,} "
            f"| {counts['lost: expired']:,} | {sum(one.processes for one in results):,} "
            f"| {sum(sum(one.faults.values()) for one in results):,} "
            f"| {max(one.longest_wait for one in results):.1f} s "
            f"| {max(one.longest_gap for one in results):.1f} s ({results[0].bound:.1f} s) "
            f"| {max(one.load for one in results):.0f} | {sum(len(one.violations) for one in results)} "
            f"| {sum(len(one.not_judged) for one in results)} |"
        )
        for one in results:
            bad += [f"{store}, seed {one.seed}: {what}" for what in one.violations]
            bad += [f"{store}, seed {one.seed}, not judged: {what}" for what in one.not_judged]
    return "\n".join((*rows, *bad))


def _judged(results: Sequence[Result]) -> str:
    """Return for how many minutes servers had what they acknowledged, if that is less than all."""
    if all(one.judged is None for one in results):
        return ""
    return (
        f" ({sum(one.minutes if one.judged is None else one.judged for one in results):.0f} judged)"
    )


def _added(counts: Iterable[dict[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return total
