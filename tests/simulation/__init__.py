"""Clients, scripts, connections and time in one process under a virtual clock; all from one seed.

What runs is the library itself: the clients from their public class down to the bytes on the wire, and
the Lua scripts on fakeredis. What is simulated is everything around it: the event loops' time, the
network, the processes' lives, the server's faults and its clock. See docs/internals/simulation.md.
"""
