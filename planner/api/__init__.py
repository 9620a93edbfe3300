"""What Python users and the command line call: tune, report, explain, misses; answers are objects with frames."""
