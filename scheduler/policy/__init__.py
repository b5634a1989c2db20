"""Who is next in line."""
