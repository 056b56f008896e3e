"""A quorum of independent servers: the Redlock algorithm (Antirez, 2015) with what it lacks.

Every server is a ``Voter`` with a queue of its own. Tickets order the queues, so they are alike on all
nodes. A request asks all nodes at once. When a majority votes for it, it writes its token to them: the
largest that any of them proposed. It holds when a majority took that token. An older request asks for a
vote back that stands in its way, and gets it unless the majority is complete: no split votes, no random
retries (Maekawa 1985, corrected by Sanders 1987).

========================  ==================================================================
``backend``               what the keeper calls, and how the rooms below are put together
``nodes``, ``trust``      which nodes are connected, and which of them may be believed
``voter``                 the messages to one node, and their answers
``votes``, ``broadcast``  what the answers about one request come to; no I/O
``tickets``               the order of requests
``requests``              the requests of this client that the nodes were asked about
``questions``             when a node is asked about a waiter again
``messenger``             one message about a request to all nodes
``asking``                from the first message to votes, a place in the queues, or a refusal
``confirming``            from votes to the token on a majority
``holding``               extending a holder
``giving_back``           a vote for which an older request asks
``leaving``               releasing, withdrawing, and going on until every node has heard of it
``notices``               what nodes say without being asked
``inspection``            what operators ask: who holds, who waits; and break
========================  ==================================================================
"""

from .backend import CAPABILITIES, QuorumBackend

__all__ = ["CAPABILITIES", "QuorumBackend"]
