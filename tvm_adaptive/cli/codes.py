"""Exit codes: what a shell script can tell apart."""

EXIT_OK = 0
EXIT_BAD_RESULT = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
