"""The command line. Importing it, and asking it for help, loads neither torch nor transformers."""
