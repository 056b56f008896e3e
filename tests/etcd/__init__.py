"""etcd alone: its messages, the recipe, its servers, and what goes wrong with them."""
