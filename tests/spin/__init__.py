"""The quorum's protocol as a model for Spin, and what runs it."""
