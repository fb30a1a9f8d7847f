"""What keeps hostile or careless peers out: who may connect and call, and how much each may have under way."""
