"""What ``benchmark.py`` is made of. Only ``job`` imports torch: jobs are processes of their own."""
