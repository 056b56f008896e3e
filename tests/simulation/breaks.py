"""What operators broke at the nodes of a quorum, and whose client cannot know of it yet."""

from __future__ import annotations

from .server import Command


class Breaks:
    """By node and token. A break is *on its way* until the client hears of it, from whichever node.

    It hears by a notice, of that token or a larger one; but of the token that its owner has already, only
    by that very token, since others were broken elsewhere. Or, while it waits, the node answers what it was
    asked after the break: then this node's vote with that token does not count any more, whatever the
    client knows of the others.

    Mutable state: ``_on_their_way`` (the nodes, by request and token), ``_broken`` (all tokens, by node and
    request), ``_heard`` (the tokens of notices, by request and node), ``_later`` (what a node
    carried out after breaks: the node, and the tokens that were broken there).
    """

    def __init__(self) -> None:
        self._on_their_way: dict[tuple[str, int], set[int]] = {}
        self._broken: dict[tuple[int, str], list[int]] = {}
        self._heard: dict[str, dict[int, set[int]]] = {}
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
        """The answer has reached the client, whose request waits."""
        if self._later and (later := self._later.pop(command, None)):
            node, broken = later
            for token in broken:
                self._on_their_way[command.id, token].discard(node)

    def noticed(self, node: int, id: str, token: int) -> None:
        """The notice has reached the client."""
        self._heard.setdefault(id, {}).setdefault(node, set()).add(token)

    def forgot(self, node: int) -> None:
        """The node came back empty. Its tokens may begin anew, so what it said before does not count."""
        for heard in self._heard.values():
            heard.pop(node, None)

    def on_their_way(self, id: str, token: int, *, of_owner: bool = False) -> set[int]:
        """Return where the vote with this token was broken, while its client cannot know.

        :param of_owner: the token is that of another hold of the same owner.
        """
        nodes = self._on_their_way.get((id, token))
        if not nodes:
            return set()
        heard = set[int]().union(*self._heard.get(id, {}).values())
        known = token in heard if of_owner else max(heard, default=0) >= token
        return set() if known else nodes
