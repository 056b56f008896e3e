"""The places where locks live. ``base`` is the protocol they fulfil."""
