"""Attention on meshes: sequences over devices, and the orders in which devices hold them."""
