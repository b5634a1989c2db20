"""Worker processes for work that may not terminate or may exhaust memory: started, messaged, limited and killed."""
