"""Worlds of the stores that clients dial by asyncio itself: the bytes are theirs, the servers are not.

``wire`` is the network, ``promises`` what must hold on every store, ``scene`` what a seed does. Each store
has a fake of its servers, its faults and its broken variants.
"""
