"""The command line. Thin: it parses, calls the engine and prints."""
