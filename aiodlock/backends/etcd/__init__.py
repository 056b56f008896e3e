"""etcd: a cluster that agrees on every write, so that a lock survives the loss of any minority."""
