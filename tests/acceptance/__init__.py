"""The published contract, read sentence by sentence by somebody who has not read the code.

Only public names are used, redis-py to look at the store, and real servers.
"""
