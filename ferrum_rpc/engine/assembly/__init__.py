"""From settings to a runner: `choose` the backends, `size` the memory, `build` the runner, `check` its results."""
