"""Transfers of KV pages that leave the devices and come back: when they are due, stores and loads."""
