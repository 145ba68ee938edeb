"""What the command line runs: one file per command or paper's table family, each with its Config and ``run``."""
