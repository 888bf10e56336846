"""Attention on meshes: sequences over devices, and the orders in which devices hold them."""

from ._reorder import positions as positions, reorder as reorder, restore as restore
