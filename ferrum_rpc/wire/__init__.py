"""Protobuf to domain and back, one file per noun. The only floor that knows both; it knows no state and no torch."""
