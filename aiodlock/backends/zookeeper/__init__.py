"""Locks in ZooKeeper: an asyncio client of our own, sessions, and queues of ephemeral sequential nodes."""
