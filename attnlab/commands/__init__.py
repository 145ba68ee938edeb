"""The commands of the command line, one file each: ``arguments(parser)`` adds its options, ``run(options)`` runs it."""
