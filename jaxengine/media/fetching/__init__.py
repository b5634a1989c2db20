"""Bytes of media from addresses, data URLs and uploads."""
