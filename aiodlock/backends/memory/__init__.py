"""Locks in memory: ``memory://`` is private to a client, ``memory://NAME`` is shared within the process.

Read in this order: ``machine`` (the protocol: what is decided and written), ``store`` (all names of one
store, and who is notified), ``backend`` (what the client's core sees).
"""
