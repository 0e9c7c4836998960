"""The command line, one file per command. The only folder that imports click."""
