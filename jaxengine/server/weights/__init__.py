"""New weights over the network."""
