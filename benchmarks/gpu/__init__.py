"""What is for a CUDA machine: the check (`check`), and first light (`first_light`), which runs everything once."""
