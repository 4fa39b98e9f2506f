"""What a machine can do at best, and how near the kernels come: measured, verified, beside each other."""
