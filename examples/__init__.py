"""Programs that show how to use aiodlock; the tests run them."""
