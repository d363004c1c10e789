"""Many nodes, one verdict: the ranks' records travel through a store, an object store or a shared directory."""
