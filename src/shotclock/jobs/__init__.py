"""Jobs: work that goes on after its caller has left, and how many may run at once. The store is between them all."""
