"""Protection against hostile or careless peers: who may connect and call, and how much each may have in progress."""
