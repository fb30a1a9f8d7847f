"""A client's session: requests as frames of one stream, the way that costs least."""
