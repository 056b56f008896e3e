"""Two stores of different shapes, each in one file, as ``docs/internals/adding-a-store.md`` explains it."""
