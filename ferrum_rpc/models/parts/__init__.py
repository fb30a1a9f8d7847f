"""What decoder layers are made of: each kind of part declares its shape, its matrices, its norms and its cache."""
