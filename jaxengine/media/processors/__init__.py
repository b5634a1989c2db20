"""What each family does with decoded pictures and videos before its tower gets them."""
