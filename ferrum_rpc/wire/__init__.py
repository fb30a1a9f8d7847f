"""Conversion between protobuf and domain, one file per noun. Only this floor knows both; it has no state and no
torch."""
