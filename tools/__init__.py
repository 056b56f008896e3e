"""What builds the documentation, and tries what is published; no part of the package."""
