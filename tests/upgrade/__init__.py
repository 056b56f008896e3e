"""May two releases run side by side? A client of a wheel beside one of the tree, on the same names."""
