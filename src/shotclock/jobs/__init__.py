"""Jobs: work that goes on after its caller has left. One keeper process each, and the store between them."""
