"""What the command line does, one file a command: ``arguments(parser)`` adds its options, ``run(options)`` does it."""
