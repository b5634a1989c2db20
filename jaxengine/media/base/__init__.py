"""What pictures, videos and sounds are to a processor, and the errors of reading them."""
