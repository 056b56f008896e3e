"""What operators broke at the nodes of a quorum, and whose client cannot know of it yet."""

from __future__ import annotations

from .server import Command


class Breaks:
    """By node and token. A break is *on its way* until the client hears of it, from whichever node.

    It hears by a notice. Or the node answers what it was asked after the break: then this node's vote with
    that token does not count any more, whatever the client knows of the others.

    Mutable state: ``_on_their_way`` (the nodes, by request and token), ``_broken`` (all tokens, by node and
    request), ``_heard`` (the largest token of a notice, by request and node), ``_later`` (what a node
    carried out after breaks: the node, and the tokens that were broken there).
    """

    def __init__(self) -> None:
        self._on_their_way: dict[tuple[str, int], set[int]] = {}
        self._broken: dict[tuple[int, str], list[int]] = {}
        self._heard: dict[str, dict[int, int]] = {}
        self._later: dict[Command, tuple[int, list[int]]] = {}

    def broke(self, node: int, id: str, token: int) -> None:
        """An operator broke the vote with this token."""
        self._on_their_way.setdefault((id, token), set()).add(node)
        self._broken.setdefault((node, id), []).append(token)

    def executed(self, node: int, command: Command) -> None:
        """A node has carried out what a client sent about its request."""
        if self._broken and (broken := self._broken.get((node, command.id))):
            self._later[command] = node, [*broken]

    def answered(self, command: Command) -> None:
        """The answer has reached the client."""
        if self._later and (later := self._later.pop(command, None)):
            node, broken = later
            for token in broken:
                self._on_their_way[command.id, token].discard(node)

    def noticed(self, node: int, id: str, token: int) -> None:
        """The notice has reached the client."""
        heard = self._heard.setdefault(id, {})
        heard[node] = max(heard.get(node, 0), token)

    def forgot(self, node: int) -> None:
        """The node came back empty. Its tokens may begin anew, so what it said before does not count."""
        for heard in self._heard.values():
            heard.pop(node, None)

    def on_their_way(self, id: str, token: int) -> set[int]:
        """Return where the vote with this token was broken, while its client cannot know."""
        nodes = self._on_their_way.get((id, token))
        if not nodes or any(heard >= token for heard in self._heard.get(id, {}).values()):
            return set()
        return nodes
