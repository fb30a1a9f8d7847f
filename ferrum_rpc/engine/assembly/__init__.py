"""From settings to a runner: `choose` what runs here, `size` what it takes, `build` it, and `check` what comes out."""
