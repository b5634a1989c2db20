"""What families are made of."""
