"""Calls on many devices."""
