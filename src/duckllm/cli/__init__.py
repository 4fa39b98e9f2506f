"""The command line, one verb a file; errors of ours end as one sentence and an exit code."""
